"""What is written down of a backend's word that a version is the one it has, and when nothing is.

Theory. A record says when its version was last confirmed (`checked_s`), and outlives the engine. A write through
changes the backend first and the record after it: an engine that is killed in between would come back to a record that
calls the old version confirmed, and in a bucket that is `immutable` nobody would ever ask about it again. So before the
backend is asked to change a key, what is here of it becomes unconfirmed (`checked_s` 0) in the index, where that
survives the process, and stays so until the write has its outcome. That time is the key's *window*.

    window opens | record 0, committed | backend asked ... answers | record of the outcome | window closes

Inside a window nothing is written down, whatever the backend says: it may have said so before the write took effect. It
is still true for those who ask meanwhile, so it is held in memory, with what the record said before; a slow write makes
no reader ask more often. A question that is under way when a window closes is *overtaken*: its answer may be older than
the write, so it is not written down either. A listing may show what a write under way has done already: what was held
of its key does not count any more then, and questions from before it are overtaken.

The index is not synced for this: what the kernel has survives every process, and after a stop of the machine nothing
counts as confirmed anyway. A key of which nothing is here costs no commit.

Rejected: dropping the record (most writes succeed, but those that do not would cost the bytes, and reads beside the
write a fetch each); a journal of intents (a second thing to recover); only where the bucket is `immutable` (it may
become so later).

Invariants. (1) No committed record calls a version confirmed that a write of this node may have replaced since. (2)
What was confirmed inside a window is fresh inside it, until a listing shows its key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from forebay.node.store.writer.writer import Store


class Question:
    """One question to the backend about one key. `overtaken`: a write of the key ended since."""

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
        """A write is about to ask the backend. True: flush the index before it does."""
        record = self._store.lookup(bucket, key)
        self._windows[bucket, key] = _Held("", 0.0) if record is None else _Held(record.version, record.checked_s)
        return self._store.unconfirm(bucket, key)

    def restore(self, bucket: str, key: str) -> None:
        """The backend did not do what the write asked for: what is here is as good as it was."""
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
        """The backend showed its keys under `prefix` from `after` to `upto` ("": to their end). What is held of those
        that are being written is older. Returns these keys."""
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
        """While the backend is asked about what is here."""
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
        """The backend had this version, said when asked at `asked_s`."""
        if (bucket, key) in self._windows:
            self._hold(bucket, key, version, asked_s)
        else:
            self._store.confirm([(bucket, key, version, asked_s)])
            self._flush_soon()

    def kept_s(self, bucket: str, key: str, version: str, checked_s: float) -> float:
        """What a new record of a version that was confirmed at `checked_s` may say of that."""
        if (bucket, key) not in self._windows:
            return checked_s
        self._hold(bucket, key, version, checked_s)
        return 0.0

    def checked_s(self, bucket: str, key: str, version: str, checked_s: float) -> float:
        """When what is here was confirmed, if its record or flight says `checked_s`."""
        held = self._windows.get((bucket, key))
        return max(checked_s, held.checked_s) if held is not None and held.version == version else checked_s

    def _hold(self, bucket: str, key: str, version: str, checked_s: float) -> None:
        held = self._windows[bucket, key]
        if held.version != version or checked_s > held.checked_s:
            self._windows[bucket, key] = _Held(version, checked_s)
