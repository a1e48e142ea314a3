"""Openings: one question to a backend about one object, shared by all who wait for its answer.

Theory. `core/machines/opening.py` decides what an answer changes, and who may share it. Here the question is asked, and
what was decided is carried out.

A question about a version that is here is a check. A question about an unknown object asks for its first FIRST_BYTES,
or for the blocks that the asked range touches. So it brings metadata and data at once, and its body becomes the
flight's first run. A suffix range asks for one block more than the suffix, which covers the blocks it touches wherever
they begin.

A reader may share the question under way if that was asked late enough. Otherwise it waits for it and shares the next
one with all that came meanwhile: at most two questions, however many ask at once. A write *overtakes* the opening of
its key: readers already waiting get the earlier version, but nobody else joins, and nothing of it is kept.

`Confirmations` records what a backend confirmed, unless a write of the key is under way (the machine's *windows*). The
index is not synced for this: what the kernel has survives every process, and after a stop of the machine nothing counts
as confirmed anyway. A key without a cached version costs no commit.

Rejected: a HEAD before the first GET (a round trip that a direct read does not make); joining any opening under way (a
reader would get an answer from before its question).

Invariants. (1) At most one opening per key. (2) The body in a `Passing` is read by one reader or closed. (3) Nothing
that was asked before a write is stored after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from forebay.backends.seam import Fetch
from forebay.core import limits
from forebay.core.errors import Busy, ForebayError, Invalid, NotFound, Precondition, Unavailable
from forebay.core.machines.opening import (
    CHECK_TIMEOUT_S,
    DOUBTS_MAX,
    DOWN_FOR_S,
    MISSED,
    Held,
    Said,
    Terms,
    Then,
    Windows,
    may_share,
    spares,
    take,
    tolerates,
)
from forebay.core.machines.shares import Need
from forebay.core.ranges import Run
from forebay.core.record import Record, State, is_pinned, make_record, own_version
from forebay.core.types import ObjectInfo, RangeSpec
from forebay.node.engine.buckets import Buckets, Served
from forebay.node.engine.counts import Tally
from forebay.node.engine.read.flights import Flight
from forebay.node.engine.read.one_read import Ask
from forebay.node.engine.read.relays import Offer, Relays
from forebay.node.store.disk.usage import taken_bytes
from forebay.node.store.writer.writer import Store

if TYPE_CHECKING:
    from forebay.node.engine.read.cold import ColdReads

log = logging.getLogger("forebay.openings")

FIRST_BYTES = 16 * limits.MIB  # an object of that size is one request, as a direct read would be
_BLOCK = limits.BLOCK_BYTES
PASSING_KEPT_S = 1.0  # how long an open body waits for the reader that asked for it
_COUNTED = {Said.SAME: "unchanged", Said.OTHER: "changed", Said.GONE: "gone", Said.NOTHING: "unreachable"}


class Passing:
    """The first body of an object that no disk takes. The first reader gets it; the others fetch for themselves."""

    def __init__(self, fetch: Fetch, first: Run) -> None:
        self.info = fetch.info
        self._body: tuple[Fetch, Run] | None = (fetch, first)

    def take(self) -> tuple[Fetch, Run] | None:
        body, self._body = self._body, None
        return body

    async def expire(self) -> None:
        await asyncio.sleep(PASSING_KEPT_S)
        if body := self.take():
            await body[0].aclose()


class Answer(NamedTuple):
    """How an opening ended: confirmed (nothing else is set), an inline object, a flight, or a body that no disk takes.
    `stale`: the backend did not answer, and the cached version may be served."""

    asked_s: float
    inline: Record | None = None
    flight: Flight | None = None
    passing: Passing | None = None
    stale: bool = False
    beyond: ObjectInfo | None = None  # the object, when the range asked for lies outside it
    offer: Offer | None = None  # take it from there; who else waited for this answer may have an offer of its own


class Opening:
    """One question to the backend about one key. `overtaken`: the key was written since, so nothing of the answer is
    kept. `answers`: how many answers the backend had given when the question began."""

    __slots__ = ("answers", "asked_s", "done", "overtaken", "served")

    def __init__(self, asked_s: float, served: Served) -> None:
        self.asked_s, self.served = asked_s, served
        self.answers = served.answers
        self.done: asyncio.Task[Answer]
        self.overtaken = False


class Openings:
    """See the module's header."""

    def __init__(self, cold: ColdReads, buckets: Buckets, tally: Tally, flush_soon: Callable[[], None]) -> None:
        self.under_way: dict[tuple[str, str], Opening] = {}
        self.confirmations = Confirmations(cold.store, buckets, flush_soon)
        self._cold, self._buckets, self._tally, self._flush_soon = cold, buckets, tally, flush_soon
        self._clock = cold.clock
        self._left: set[asyncio.Task[Answer]] = set()  # of those that nobody can join any more

    async def share(self, ask: Ask, served: Served, terms: Terms) -> Answer | None:
        """The answer of this key's opening. None if the one under way began too early to count, or was not for us."""
        name = (ask.bucket, ask.key)
        opening = self.under_way.get(name)
        if opening is not None and opening.done.done():
            opening = None  # it is forgotten only after this round; waiting for it again would never let the round end
        if opening is not None and not opening.served.same_place(served):
            self._leave_to_its_own(opening)  # the bucket moved: only those who wait for it already get its answer
            opening = None
        if opening is None:
            opening = Opening(self._clock.wall_s(), served)
            opening.done = asyncio.create_task(self._ask_backend(ask, opening, terms))
            self.under_way[name] = opening
            opening.done.add_done_callback(lambda done: self._opened(name, done))
            return await asyncio.shield(opening.done)
        answers = opening.served.answers
        try:
            answer = await asyncio.shield(opening.done)
        except (Invalid, Precondition):
            return None  # somebody else's range lies outside the object, or somebody else's version is gone
        except ForebayError:
            if may_share(terms, opening.asked_s):
                raise
            return None
        shared = may_share(terms, opening.asked_s, stale=answer.stale, answers=answers, answers_before=opening.answers)
        return answer if shared else None

    async def head(self, served: Served, key: str, by: Opening | None = None) -> ObjectInfo:
        """The metadata of an object of which nothing is here. `by`: the opening that needs it."""
        name = (served.bucket.name, key)
        try:
            info = await served.backend.head(key)
        except NotFound:
            self.shown(name, "", by)
            raise
        self.shown(name, info.version, by)
        return info

    def shown(self, name: tuple[str, str], version: str, by: Opening | None = None) -> None:
        """The backend told somebody of this version ("": of none, or of another than was asked about). Whoever heard it
        must find no older version here, even while the key is written. `by`: the opening that asked."""
        if self.confirmations.windows.shown(name, version):
            self._outdated(name, by)

    def listed(self, bucket: str, prefix: str, after: str, upto: str) -> None:
        """As `shown`, for the keys that the backend listed."""
        for key in self.confirmations.windows.listed(bucket, prefix, after, upto):
            self._outdated((bucket, key), None)

    def _outdated(self, name: tuple[str, str], by: Opening | None) -> None:
        flight = self._cold.flights.get(name)
        if flight is not None:
            flight.checked_s = min(flight.checked_s, 0.0)
        if by is None or self.under_way.get(name) is not by:
            self.overtake(name)

    def _leave_to_its_own(self, opening: Opening) -> None:
        self._left.add(opening.done)
        opening.done.add_done_callback(self._left.discard)

    def overtake(self, name: tuple[str, str]) -> None:
        """The key has another version by now: nobody joins its opening, and nothing of that is kept."""
        opening = self.under_way.pop(name, None)
        if opening is not None:
            opening.overtaken = True
            self._leave_to_its_own(opening)

    def _opened(self, name: tuple[str, str], done: asyncio.Task[Answer]) -> None:
        opening = self.under_way.get(name)
        if opening is not None and opening.done is done:
            del self.under_way[name]
        if not done.cancelled():
            done.exception()  # the waiter has the exception

    def cancel(self) -> list[asyncio.Task[Answer]]:
        """Ask no more. The tasks returned end soon."""
        tasks = [*self._left, *(opening.done for opening in self.under_way.values())]
        for task in tasks:
            task.cancel()
        return tasks

    # --- a version that is here --------------------------------------------------------------------------------------
    async def _ask_backend(self, ask: Ask, opening: Opening, terms: Terms) -> Answer:
        found, record = self._cold.here((ask.bucket, ask.key))
        if record is not None and record.state & State.OWNED:
            return Answer(opening.asked_s)  # written since we were asked
        if found is not None:
            then, _ = await self.check(opening.served, ask.key, found, terms, opening.asked_s, by=opening)
            if then is not Then.FETCH:
                return Answer(opening.asked_s, stale=then is Then.STALE)
        return await self._first_fetch(ask, opening)

    async def check(
        self,
        served: Served,
        key: str,
        found: Flight | Record,
        terms: Terms,
        asked_s: float,
        *,
        by: Opening | None = None,
    ) -> tuple[Then, ObjectInfo | None]:
        """Ask the backend whether the version is current, and do what its answer changes here. Returns how it goes on,
        and the new metadata for FETCH. The backend's error for FAIL, `Precondition` for CHANGED. `by`: the opening that
        needs it."""
        name = (served.bucket.name, key)
        held = self.confirmations.held(name, found)
        if spares(held, terms, served.silent_until_s, self._clock.monotonic_s()):
            self._tally.revalidations["unreachable"] += 1
            return Then.STALE, None
        windows = self.confirmations.windows
        info: ObjectInfo | None = None
        error: Exception | None = None
        question = windows.ask(name)
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S if tolerates(held, terms) else None):
                info = await served.backend.check(key, held.version)
            said = Said.SAME if info is None else Said.OTHER
        except NotFound as caught:
            said, error = Said.GONE, caught
        except (Unavailable, Busy, TimeoutError) as caught:
            said, error = Said.NOTHING, caught
        finally:
            windows.answered(name, question)
        self._tally.revalidations[_COUNTED[said]] += 1
        version = info.version if info is not None else ""
        # Another node in the backend's place claims the key from this one before it answers: that overtakes nothing.
        overtaken = question.overtaken and served.of is None
        taken = take(said, held, terms, version=version, overtaken=overtaken)
        if taken.drop:
            self.shown(name, version, by)
            self._cold.replaced(name, held.version)
        if taken.confirm:
            self._confirm(served, name, held.version, asked_s)
        if taken.hush:
            self._hush(served, error)
        if taken.then is Then.CHANGED:
            raise changed_meanwhile(*name)
        if taken.then is Then.FAIL:
            assert error is not None
            raise error
        return taken.then, info

    def _confirm(self, served: Served, name: tuple[str, str], version: str, asked_s: float) -> None:
        if self.confirmations.heard(served, name, version, asked_s) == MISSED:
            return
        self.confirmations.confirm(*name, version, asked_s)
        flight = self._cold.flights.get(name)
        if flight is not None and flight.info.version == version:
            flight.checked_s = asked_s

    def _hush(self, served: Served, error: BaseException | None) -> None:
        now_s = self._clock.monotonic_s()
        if served.silent_until_s <= now_s:
            log.warning("bucket %s does not answer (%s): serving what is here", served.bucket.name, error)
        served.silent_until_s = now_s + DOWN_FOR_S

    # --- an unknown object -------------------------------------------------------------------------------------------
    async def _first_fetch(self, ask: Ask, opening: Opening) -> Answer:
        """The request that finds out what the object is and brings its first bytes."""
        served, asked_s, name = opening.served, opening.asked_s, (ask.bucket, ask.key)
        version = ask.version
        async with self._cold.permits(served.bucket.name).claim(opening, Need.FIRST):
            if relays := self._cold.relays:
                info, offer = await self._relayed(relays, ask, opening)
                if offer is not None:
                    return Answer(asked_s, offer=offer)
                version = info.version if info is not None else version
            try:
                fetch = await self._fetch(served, ask, version)
            except Invalid as error:
                if error.code != "InvalidRange":
                    raise
                return await self._beyond(ask, opening)
            except (NotFound, Precondition):
                self.shown(name, "", opening)
                raise
        try:
            info = fetch.info
            self.shown(name, info.version, opening)  # overtaken by one write, it may show the next
            if info.size_bytes <= limits.INLINE_BYTES_MAX:
                return Answer(asked_s, inline=await self._read_inline(opening, fetch))
            run = whole_blocks(fetch)
            checked_s = self.confirmations.heard(served, name, info.version, asked_s)
            landing = None if opening.overtaken else self._cold.landing(served, info, checked_s)
            if landing is None:
                passing = Passing(fetch, Run(run.first, min(run.end, run.first + 2)))
                self._cold.spawn(passing.expire())
                return Answer(asked_s, passing=passing)
            return Answer(asked_s, flight=self._cold.take_off(served, info, landing, checked_s, None, (fetch, run)))
        except BaseException:
            await fetch.aclose()
            raise

    async def _relayed(self, relays: Relays, ask: Ask, opening: Opening) -> tuple[ObjectInfo | None, Offer | None]:
        """What the backend says of the object, if it was asked, and how the read is relayed, if it is."""
        place = None if self._cold.foretold(ask.bucket, ask.key) else relays.place(ask, opening.served)
        if place is None:
            return None, None
        info = relays.known(ask) or await self.head(opening.served, ask.key, opening)
        return info, relays.offer(ask, opening.served, place, info)

    async def _fetch(self, served: Served, ask: Ask, version: str) -> Fetch:
        """The first bytes: of `version`, if they are that still, for a read that names none."""
        wanted = first_request(ask.range)
        try:
            return await served.backend.fetch(ask.key, wanted, version=version)
        except Precondition:
            if version == ask.version:
                raise
        return await served.backend.fetch(ask.key, wanted)

    async def _beyond(self, ask: Ask, opening: Opening) -> Answer:
        """The range lies outside the object. Either the object is empty, or the reader must learn its size."""
        info = await self.head(opening.served, ask.key, opening)
        if info.size_bytes == 0:
            return Answer(opening.asked_s, inline=self._keep_inline(opening, info, b""))
        return Answer(opening.asked_s, beyond=info)

    async def _read_inline(self, opening: Opening, fetch: Fetch) -> Record:
        info, body = fetch.info, bytearray()
        async for chunk in fetch:
            body += chunk
        await fetch.aclose()
        if fetch.start != 0 or len(body) != info.size_bytes:
            raise Unavailable(f"the backend sent {len(body)} bytes of {info.size_bytes} of {info.key}: try again")
        return self._keep_inline(opening, info, bytes(body))

    def _keep_inline(self, opening: Opening, info: ObjectInfo, body: bytes) -> Record:
        bucket, asked_s = opening.served.bucket, opening.asked_s
        pinned = is_pinned(bucket, info.key)
        if opening.overtaken or not self._buckets.stands(opening.served):
            return make_record(info, asked_s, inline=body)
        heard_s = self.confirmations.heard(opening.served, (bucket.name, info.key), info.version, asked_s)
        checked_s = self.confirmations.kept_s(bucket.name, info.key, info.version, heard_s)
        try:
            record = self._cold.store.put_inline(bucket.name, info, body, checked_s=checked_s, pinned=pinned)
        except Unavailable:
            self._tally.passed_bytes += len(body)
            return make_record(info, asked_s, inline=body)
        volume_id = self._cold.store.volume_of(bucket.name, info.key)
        self._cold.evictor.landed(volume_id, (record.object_id, 0), taken_bytes(record), bucket.name, info.key, pinned)
        self._flush_soon()
        return record


class Confirmations:
    """When the backend last confirmed what is here: the index and the machine's windows together. `flush_soon` is
    called after changes to the store. What another node confirmed, which stood in the backend's place, counts only
    while this node does not act on the key. Nobody tells this node what the other did before it let go of the key. So
    that is held in memory, and neither a record nor a flight says it."""

    def __init__(self, store: Store, buckets: Buckets, flush_soon: Callable[[], None]) -> None:
        self.windows = Windows()
        self._store, self._buckets, self._flush_soon = store, buckets, flush_soon
        self._elsewhere: dict[tuple[str, str], tuple[str, float]] = {}  # version, and when it was confirmed

    def _answers(self, bucket: str) -> int:
        served = self._buckets.known(bucket)
        return 0 if served is None else served.answers

    # --- by writes ---
    def open_window(self, bucket: str, key: str) -> bool:
        """A write is about to ask the backend. Returns True if the index must be flushed first."""
        record = self._store.lookup(bucket, key)
        held = ("", 0.0) if record is None else (record.version, record.checked_s)
        self.windows.open((bucket, key), *held, self._answers(bucket))
        return self._store.unconfirm(bucket, key)

    def restore(self, bucket: str, key: str) -> None:
        """The backend refused the write: restore the confirmation that was held."""
        held = self.windows.refused((bucket, key))
        if held is not None and self._buckets.is_here(bucket, key):
            self._store.confirm([(bucket, key, *held)])
            self._flush_soon()

    def close_window(self, bucket: str, key: str) -> None:
        """The write has its outcome, or its record says that there is none."""
        record = self._store.lookup(bucket, key)
        self.windows.close((bucket, key), in_doubt=record is not None and record.checked_s <= 0)

    # --- by reads ---
    def held(self, name: tuple[str, str], found: Flight | Record, *, is_owned: bool = False) -> Held:
        """What is here, for the machine."""
        held = held_of(found, is_owned=is_owned)
        answers = self._answers(name[0])
        if name in self._elsewhere and self._buckets.is_here(*name):
            del self._elsewhere[name]
        elif name in self._elsewhere:
            version, checked_s = self._elsewhere[name]
            return held._replace(checked_s=checked_s) if version == held.version else held
        return held._replace(checked_s=self.windows.checked_s(name, held.version, held.checked_s, answers))

    def heard(self, served: Served, name: tuple[str, str], version: str, asked_s: float) -> float:
        """The `checked_s` that a flight may have of a version that was confirmed when asked at `asked_s`: none if this
        node does not act on the key, or did not then."""
        if served.of is None:
            return asked_s if self._buckets.is_here(*name) else MISSED
        self._elsewhere.pop(name, None)
        self._elsewhere[name] = version, asked_s
        if len(self._elsewhere) > DOUBTS_MAX:
            del self._elsewhere[next(iter(self._elsewhere))]
        return MISSED

    def confirm(self, bucket: str, key: str, version: str, asked_s: float) -> None:
        """The backend confirmed this version when this node, which acts on the key, asked at `asked_s`."""
        if self.windows.may_record((bucket, key), version, asked_s):
            self._store.confirm([(bucket, key, version, asked_s)])
            self._flush_soon()

    def kept_s(self, bucket: str, key: str, version: str, checked_s: float) -> float:
        """The `checked_s` for a new record of a version that was confirmed at `checked_s`: none inside a window."""
        if not self._buckets.is_here(bucket, key):
            return MISSED
        return checked_s if self.windows.may_record((bucket, key), version, checked_s) else min(checked_s, 0.0)


def held_of(found: Flight | Record, *, is_owned: bool = False) -> Held:
    """What is here, as its record or its flight says."""
    version = found.info.version if isinstance(found, Flight) else found.version
    return Held(version, own_version(found.object_id), is_owned, found.checked_s)


def first_request(asked: RangeSpec | None) -> RangeSpec:
    """The range that finds out what an unknown object is, and fetches the first bytes that the reader wants."""
    if asked is None:
        return RangeSpec(0, FIRST_BYTES - 1)
    if asked.first is None:
        return RangeSpec(None, min((asked.last or 0) + _BLOCK, FIRST_BYTES))
    first = asked.first // _BLOCK * _BLOCK
    last = first + FIRST_BYTES - 1
    return RangeSpec(
        first,
        last if asked.last is None else min(last, (asked.last // _BLOCK + 1) * _BLOCK - 1),
    )


def whole_blocks(fetch: Fetch) -> Run:
    """The blocks that a first body covers completely."""
    first = -(-fetch.start // _BLOCK)
    end = -(-fetch.end // _BLOCK) if fetch.end == fetch.info.size_bytes else fetch.end // _BLOCK
    if first >= end:
        raise Unavailable(
            f"the backend answered bytes {fetch.start}-{fetch.end} of {fetch.info.size_bytes} of {fetch.info.key}, "
            "which is not what was asked for: check the backend for a proxy that rewrites answers"
        )
    return Run(first, end)


def changed_meanwhile(bucket: str, key: str) -> Precondition:
    return Precondition(f"{bucket}/{key} changed under an open read: open it again", code="PreconditionFailed")
