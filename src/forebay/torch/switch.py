"""Switches from the node to another of its cluster, or to the bucket's backend, when the node is away, and back.

Theory. `NodeOrBackend` stands between the patience (`source.Patient`) and the node, and remembers since when the node
fails. After OTHER_AFTER_S, if the node does not say that it is ready either, another node of its cluster stands in that
does say so and has the same bucket. After `after_s`, if there is none, reads go to the backend (`direct.py`). The log
has a warning of each. Meanwhile a thread looks every LOOK_S at most whether the node is ready again, so no read waits
for an absent node.

A node that answers is not away, however busy it or its backend is: reads wait for it.

*Stand-ins.* The node told its cluster's map when the dataset was made, and is asked for it again every LEARN_S. Each
process begins at another place of the list, so that the workers of a node that died spread over the others. A stand-in
whose answer could differ from the node's (it has an older version, or does not let us read) is not asked again.

Each process finds out by itself: workers share nothing. A bucket that cannot be read here (no credentials, another
machine's directory) is refused once, with a warning. Then the node is waited for, and the error at the end of the
patience says why there was no other way.

Invariants. (1) Nothing is read past the nodes before the own one has failed for `after_s`. (2) Answers say how many of
their items came past the nodes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from forebay.client.patience import WAITED_FOR
from forebay.core.errors import Denied, ForebayError, NotFound, Precondition, Unavailable
from forebay.core.formats.listing import Listing
from forebay.core.formats.members import MemberIndex
from forebay.core.messages.batch import Item
from forebay.core.types import Bucket
from forebay.ports import clock
from forebay.torch.direct import DirectSource, Refused, settings_given, settings_told
from forebay.torch.source import Answers, NodeSource, Telling

DIRECT_AFTER_S = 60.0  # a restart takes seconds; a job of a thousand GPUs that stands still costs more than slow reads
OTHER_AFTER_S = 3.0  # a node whose process is started again is back by then
LOOK_S = 2.0  # between looks whether the node is back
LEARN_S = 600.0  # between looks at the map: jobs run for weeks, and nodes are replaced
log = logging.getLogger("forebay.torch")
T = TypeVar("T")


class NodeOrBackend:
    """`node`, or another of its cluster, or what they serve read past them. `direct`: where the bucket is, if the user
    said so; else the node tells.
    `after_s` None: never past the nodes."""

    def __init__(
        self, node: NodeSource, bucket: str, after_s: float | None, direct: Mapping[str, str] | None = None
    ) -> None:
        self.node, self.after_s, self._name = node, after_s, bucket
        self._direct = DirectSource(settings_given(bucket, direct), True) if direct is not None else None
        self._never = ""  # why the bucket can never be read past the node
        self._refused = ""  # why not during this absence
        self._past = False
        self._other: NodeSource | None = None  # stands in for the node
        self._others: tuple[str, ...] = ()  # URLs of those that could
        self._settings: Bucket | None = None  # what the node says of the bucket
        self._unfit: frozenset[str] = frozenset()
        self._learn_at_s = 0.0
        self._failing_since_s: float | None = None
        self._looked_s = 0.0
        self._locks: dict[int, threading.Lock] = {}  # by process: one that is held in a fork stays held in the child

    def __getstate__(self) -> dict[str, Any]:
        begun = {"_locks": {}, "_past": False, "_other": None, "_failing_since_s": None, "_looked_s": 0.0}
        return self.__dict__ | begun

    def listing(self, bucket: str, prefix: str, id: str = "") -> Listing:
        return self._ask(
            lambda node: node.listing(bucket, prefix, id), lambda direct: direct.listing(bucket, prefix, id)
        )

    def members(self, bucket: str, key: str, etag: str, version: str = "") -> MemberIndex:
        return self._ask(
            lambda node: node.members(bucket, key, etag, version),
            lambda direct: direct.members(bucket, key, etag, version),
        )

    def get_many(self, items: Sequence[Item]) -> Answers:
        return self._ask(
            lambda node: node.get_many(items), lambda direct: Answers(direct.get_many(items), direct=len(items))
        )

    def room_bytes(self, bucket: str, *, cluster: bool = False) -> int | None:
        try:
            return None if self._past else self.node.room_bytes(bucket, cluster=cluster)
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

    # --- which of the three ------------------------------------------------------------------------------------------
    def _ask(self, of_node: Callable[[NodeSource], T], past_it: Callable[[DirectSource], T]) -> T:
        if self._past:
            self._look()
            return self._ask_past(past_it, None)
        began_s = clock.monotonic_s()
        while (other := self._other) is not None:
            self._look()
            try:
                found = of_node(other)
            except ForebayError as error:
                if not isinstance(error, WAITED_FOR) and not _differs(error):
                    raise
                self._leave(other, error)
                continue
            if not isinstance(found, Answers) or not any(map(_differs, found.values)):
                return found
            self._leave(other, None)
        try:
            found = of_node(self.node)
        except WAITED_FOR as error:
            if not self._is_gone(began_s):
                raise self._explained(error) from error
            if self._other is not None:
                return self._ask(of_node, past_it)
            return self._ask_past(past_it, error)
        self._failing_since_s, self._refused = None, ""
        if self._direct is None and not self._never and self.after_s is not None:
            self._learn()
        if began_s >= self._learn_at_s:
            self._learn_others(self.node)
        self._unfit = frozenset()
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
        """Whether to turn to another node or to the backend, after the node failed what was asked at `began_s`."""
        with self._lock:
            if self._past or self._other is not None:
                return True
            if self._failing_since_s is None:
                self._failing_since_s = began_s
            away_s = clock.monotonic_s() - self._failing_since_s
            others = away_s >= OTHER_AFTER_S and self._others
            past = self.after_s is not None and away_s >= self.after_s and self._direct is not None
            if (not others and (not past or self._refused)) or self.node.answers():
                return False
            self._looked_s = clock.monotonic_s()
            if others and self._find_other():
                return True
            if not past or self._refused:
                return False
            assert self._direct is not None
            self._past = True
            log.warning(
                "the node at %s has not answered for %.0f s: %s is read from %s itself, more slowly, until it does",
                self.node.url, away_s, self._name, self._direct.bucket.url,
            )  # fmt: skip
            return True

    # --- other nodes -------------------------------------------------------------------------------------------------
    def _learn_others(self, node: NodeSource) -> None:
        self._learn_at_s = clock.monotonic_s() + LEARN_S
        try:
            self._others = tuple(url for url in node.nodes() if url != self.node.url)
            if self._others and node is self.node:
                self._settings = node.settings(self._name)
        except ForebayError:
            pass  # whoever may not see the map, or the settings, has no others

    def _find_other(self) -> bool:
        """Have another node stand in that is ready and has the bucket, if there is one."""
        begin = os.getpid() % len(self._others)
        for url in (*self._others[begin:], *self._others[:begin]):
            if url in self._unfit:
                continue
            other = self.node.at(url)
            try:
                fits = other.answers() and _place(other.settings(self._name)) == _place(self._settings)
            except ForebayError:
                fits = False
            if fits:
                log.warning(
                    "the node at %s does not answer: %s is read at the node at %s until it does",
                    self.node.url, self._name, url,
                )  # fmt: skip
                self._learn_others(other)
                self._other = other
                return True
        return False

    def _leave(self, other: NodeSource, error: ForebayError | None) -> None:
        """Let `other` stand in no more after `error`, or an answer that may differ; raises the error where waiting for
        `other` is right."""
        if error is None or _differs(error):
            self._unfit |= {other.url}
        elif other.answers():
            raise error
        with self._lock:
            if self._other is other:
                self._other = None

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
            self._failing_since_s, self._past, self._other = None, False, None
            log.warning("the node at %s answers again: %s is read through it", self.node.url, self._name)

    @property
    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())


def _place(bucket: Bucket | None) -> tuple[str, str] | None:
    return (bucket.url, bucket.write) if bucket is not None else None


def _differs(answer: object) -> bool:
    """Whether the node that a stand-in stands in for might answer otherwise."""
    if isinstance(answer, NotFound):
        return answer.code in ("NoSuchBucket", "NoSuchListing")
    return isinstance(answer, Precondition | Denied)
