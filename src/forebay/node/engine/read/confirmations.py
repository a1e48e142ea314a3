"""When the backend last confirmed a cached version, and when that must not be recorded.

Theory. A record says when its version was last confirmed (`checked_s`), and outlives the engine. A write through
changes the backend first and the record after it. If the engine is killed in between, the next one would find a record
that calls the old version confirmed, and an `immutable` bucket would never ask again. So before the backend is asked to
change a key, the cached version becomes unconfirmed in the index (`checked_s` 0), which survives the process. It stays
so until the write has its outcome. That time is the key's *window*.

    window opens | record 0, committed | backend asked ... answers | record of the outcome | window closes

Inside a window no confirmation is recorded: the backend may have given it before the write took effect. It still counts
for reads meanwhile, so memory holds it, with what the record said before; a slow write makes no reader ask more often.
A question that is under way when a window closes is *overtaken*: its answer may be older than the write, so it is not
recorded either. A listing may already show the effect of a write under way. Then the confirmations held for its key no
longer count, and earlier questions are overtaken.

The index is not synced for this: what the kernel has survives every process, and after a stop of the machine nothing
counts as confirmed anyway. A key without a cached version costs no commit.

Rejected: dropping the record (most writes succeed, but those that do not would cost the bytes, and reads beside the
write a fetch each); a journal of intents (a second thing to recover); only where the bucket is `immutable` (it may
become so later).

Invariants. (1) No committed record calls a version confirmed that a write of this node may have replaced since. (2) A
version confirmed inside a window is fresh inside it, until a listing shows its key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from forebay.node.store.writer.writer import Store


class Question:
    """One question to the backend about one key. `overtaken`: a write of the key ended since it was asked."""

    __slots__ = ("overtaken",)

    def __init__(self) -> None:
        self.overtaken = False


class _Held(NamedTuple):
    version: str
    checked_s: float


class Confirmations:
    """See the module's header. `flush_soon` is called after changes to the store."""

    def __init__(self, store: Store, flush_soon: Callable[[], None]) -> None:
        self._store = store
        self._flush_soon = flush_soon
        self._windows: dict[tuple[str, str], _Held] = {}
        self._questions: dict[tuple[str, str], set[Question]] = {}

    # --- by writes ---------------------------------------------------------------------------------------------------
    def open_window(self, bucket: str, key: str) -> bool:
        """A write is about to ask the backend. Returns True if the index must be flushed first."""
        record = self._store.lookup(bucket, key)
        self._windows[bucket, key] = _Held("", 0.0) if record is None else _Held(record.version, record.checked_s)
        return self._store.unconfirm(bucket, key)

    def restore(self, bucket: str, key: str) -> None:
        """The backend refused the write: restore the confirmation that was held."""
        held = self._windows[bucket, key]
        if held.checked_s > 0:
            self._store.confirm([(bucket, key, *held)])
            self._flush_soon()

    def close_window(self, bucket: str, key: str) -> None:
        """The write has its outcome."""
        self._windows.pop((bucket, key), None)
        for question in self._questions.get((bucket, key), ()):
            question.overtaken = True

    def outdated(self, bucket: str, prefix: str, after: str, upto: str) -> list[str]:
        """The backend listed its keys under `prefix` from `after` to `upto` ("": to their end). For keys that are being
        written, drop the confirmations held, which are older. Returns these keys."""
        written = [
            key
            for of_bucket, key in self._windows
            if of_bucket == bucket and key.startswith(prefix) and after < key and (not upto or key <= upto)
        ]
        for key in written:
            self._windows[bucket, key] = _Held("", 0.0)
            for question in self._questions.get((bucket, key), ()):
                question.overtaken = True
        return written

    # --- by reads ----------------------------------------------------------------------------------------------------
    @contextmanager
    def question(self, bucket: str, key: str) -> Iterator[Question]:
        """Spans a question to the backend about a cached version."""
        name, question = (bucket, key), Question()
        asked = self._questions.setdefault(name, set())
        asked.add(question)
        try:
            yield question
        finally:
            asked.discard(question)
            if not asked and self._questions.get(name) is asked:
                del self._questions[name]

    def confirm(self, bucket: str, key: str, version: str, asked_s: float) -> None:
        """The backend confirmed this version when asked at `asked_s`."""
        if (bucket, key) in self._windows:
            self._hold(bucket, key, version, asked_s)
        else:
            self._store.confirm([(bucket, key, version, asked_s)])
            self._flush_soon()

    def kept_s(self, bucket: str, key: str, version: str, checked_s: float) -> float:
        """The `checked_s` for a new record of a version that was confirmed at `checked_s`: none inside a window."""
        if (bucket, key) not in self._windows:
            return checked_s
        self._hold(bucket, key, version, checked_s)
        return min(checked_s, 0.0)

    def checked_s(self, bucket: str, key: str, version: str, checked_s: float) -> float:
        """When this version was confirmed, if its record or flight says `checked_s`."""
        held = self._windows.get((bucket, key))
        return max(checked_s, held.checked_s) if held is not None and held.version == version else checked_s

    def _hold(self, bucket: str, key: str, version: str, checked_s: float) -> None:
        held = self._windows[bucket, key]
        if held.version != version or checked_s > held.checked_s:
            self._windows[bucket, key] = _Held(version, checked_s)
