"""Switches from the node to the bucket's backend when the node is away too long, and back.

Theory. `NodeOrBackend` stands between the patience (`source.Patient`) and the node, and remembers since when the node
fails. After `after_s`, if the node does not say that it is ready either, reads go to the backend (`direct.py`), with a
warning in the log. Meanwhile a thread looks every LOOK_S at most whether the node is ready again, so no read waits for
an absent node.

A node that answers is not away, however busy it or its backend is: reads wait for it.

Each process finds out by itself: workers share nothing. A bucket that cannot be read here (no credentials, another
machine's directory) is refused once, with a warning. Then the node is waited for, and the error at the end of the
patience says why there was no other way.

Invariants. (1) Nothing is read past the node before it has failed for `after_s`. (2) Answers say how many of their
items came past the node.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from forebay.client.patience import WAITED_FOR
from forebay.core.errors import ForebayError, Unavailable
from forebay.core.formats.listing import Listing
from forebay.core.formats.members import MemberIndex
from forebay.core.messages.batch import Item
from forebay.ports import clock
from forebay.torch.direct import DirectSource, Refused, settings_given, settings_told
from forebay.torch.source import Answers, NodeSource, Telling

DIRECT_AFTER_S = 60.0  # a restart takes seconds; a job of a thousand GPUs that stands still costs more than slow reads
LOOK_S = 2.0  # between looks whether the node is back
log = logging.getLogger("forebay.torch")
T = TypeVar("T")


class NodeOrBackend:
    """`node`, or what it serves read past it. `direct`: where the bucket is, if the user said so; else the node tells.
    `after_s` None: never past the node."""

    def __init__(
        self, node: NodeSource, bucket: str, after_s: float | None, direct: Mapping[str, str] | None = None
    ) -> None:
        self.node, self.after_s, self._name = node, after_s, bucket
        self._direct = DirectSource(settings_given(bucket, direct), True) if direct is not None else None
        self._never = ""  # why the bucket can never be read past the node
        self._refused = ""  # why not during this absence
        self._past = False
        self._failing_since_s: float | None = None
        self._looked_s = 0.0
        self._locks: dict[int, threading.Lock] = {}  # by process: one that is held in a fork stays held in the child

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_locks": {}, "_past": False, "_failing_since_s": None, "_looked_s": 0.0}

    def listing(self, bucket: str, prefix: str, id: str = "") -> Listing:
        found = self._ask(
            lambda: self.node.listing(bucket, prefix, id), lambda direct: direct.listing(bucket, prefix, id)
        )
        if self._direct is None and not self._never and self.after_s is not None:
            self._learn()
        return found

    def members(self, bucket: str, key: str, etag: str) -> MemberIndex:
        return self._ask(lambda: self.node.members(bucket, key, etag), lambda direct: direct.members(bucket, key, etag))

    def get_many(self, items: Sequence[Item]) -> Answers:
        return self._ask(
            lambda: self.node.get_many(items), lambda direct: Answers(direct.get_many(items), direct=len(items))
        )

    def room_bytes(self, bucket: str) -> int | None:
        try:
            return None if self._past else self.node.room_bytes(bucket)
        except ForebayError:
            return None

    def hints(self, job: str, listing: Listing) -> Telling | None:
        return self.node.hints(job, listing)

    def _learn(self) -> None:
        try:
            self._direct = DirectSource(settings_told(self.node.settings(self._name)))
        except Refused as refused:
            self._never = str(refused)
        except ForebayError as error:
            self._never = f"the node did not say where that is ({error.message}): give direct={{'url': …}}"

    # --- which of the two --------------------------------------------------------------------------------------------
    def _ask(self, of_node: Callable[[], T], past_it: Callable[[DirectSource], T]) -> T:
        if self._past:
            self._look()
            return self._ask_past(past_it, None)
        began_s = clock.monotonic_s()
        try:
            found = of_node()
        except WAITED_FOR as error:
            if not self._is_gone(began_s):
                raise self._explained(error) from error
            return self._ask_past(past_it, error)
        self._failing_since_s, self._refused = None, ""
        return found

    def _ask_past(self, past_it: Callable[[DirectSource], T], error: ForebayError | None) -> T:
        direct = self._direct
        assert direct is not None, "else nobody turns to it"
        try:
            return past_it(direct)
        except Refused as refused:
            with self._lock:
                if not self._refused:
                    log.warning("%s cannot be read past the node (%s): waiting for the node", direct, refused)
                self._refused, self._past = str(refused), False
            raise self._explained(error or Unavailable(f"the node at {self.node.url} does not answer")) from refused

    def _explained(self, error: ForebayError) -> ForebayError:
        """The error, and why that is the end of it: the bucket cannot be read here either."""
        why = self._never or self._refused
        since_s = self._failing_since_s
        if not why or self.after_s is None or since_s is None or clock.monotonic_s() - since_s < self.after_s:
            return error
        message = f"{error.message}; {self._name} cannot be read past the node: {why}"
        return type(error)(message, code=error.code, retry_after_s=error.retry_after_s)

    def _is_gone(self, began_s: float) -> bool:
        """Whether to turn to the backend, after the node failed what was asked at `began_s`."""
        with self._lock:
            if self._past:
                return True
            if self._failing_since_s is None:
                self._failing_since_s = began_s
            away_s = clock.monotonic_s() - self._failing_since_s
            if self.after_s is None or away_s < self.after_s or self._direct is None or self._refused:
                return False
            if self.node.answers():
                return False
            self._past, self._looked_s = True, clock.monotonic_s()
            log.warning(
                "the node at %s has not answered for %.0f s: %s is read from %s itself, more slowly, until it does",
                self.node.url, away_s, self._name, self._direct.bucket.url,
            )  # fmt: skip
            return True

    # --- the way back ------------------------------------------------------------------------------------------------
    def _look(self) -> None:
        """Have somebody look whether the node is back, if nobody did lately."""
        with self._lock:
            if clock.monotonic_s() - self._looked_s < LOOK_S:
                return
            self._looked_s = clock.monotonic_s()
        threading.Thread(target=self._go_back, name="forebay-look", daemon=True).start()

    def _go_back(self) -> None:
        if self.node.answers():
            self._failing_since_s, self._past = None, False
            log.warning("the node at %s answers again: %s is read through it", self.node.url, self._name)

    @property
    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())
