"""Listings of whole prefixes: made once for all who ask, and kept.

Theory. A job's ranks and workers all want the same listing at the same time. The first to ask starts it
(`read/parallel_listing.py`, page by page through `Pages`, so that it includes what only this node has); the others
wait for it. Whoever comes within the bucket's freshness gets the same listing. As with reads, a listing counts from
the moment it began: an asker who needs a later one waits for the one under way and shares the next.

A listing is kept as a derived object under its bucket, prefix and id, and the fronts send it from there. If the store
has no room for it, memory holds it (HELD_BYTES_MAX, but always the newest), and it is sent from there in parts. Small
ones memory holds in any case: in a small cache they would leave before the job that asked gives its hints. Earlier
listings stay in the store until they are evicted; while one is there, the node can say what changed since.

Nobody waits silently for long: after WAIT_S the answer is the listing's progress, and the asker asks again.

A write through this node makes the listings of its key stale at once, whatever the freshness: a writer sees its own
writes. Local buckets are listed anew for every asker, from the index. The index, and backends that cannot start at an
arbitrary key, are listed page after page.

The versions of a bucket's objects (`core/versions.py`) are listed as the backend has them now, for every asker anew:
whoever asks wants to keep what there is. Where this node has writes that the backend does not, it refuses: they have no
version yet.

Invariants. (1) At most one listing of a (bucket, prefix) is under way. (2) A listing is given out only while the
bucket is the place that was listed. (3) An asker never gets a listing that began before the moment it needs.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from concurrent.futures import Executor

from forebay.core import limits
from forebay.core.errors import ForebayError, Invalid, NotFound, NotSupported, Precondition
from forebay.core.formats.listing import Listing, ListingCall, ListingPartCall, ListingState, build, derived_key
from forebay.core.messages.calls import ListCall
from forebay.core.types import FRESH_IMMUTABLE, ListPage
from forebay.core.versions import whose_versions
from forebay.node.engine.buckets import Buckets, Served
from forebay.node.engine.read.pages import Pages
from forebay.node.engine.read.parallel_listing import HANDS, Survey
from forebay.node.store.derived import Derived
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.listings")

WAIT_S = 10.0
HELD_BYTES_MAX = 128 * limits.MIB
SMALL_BYTES_MAX = 4 * limits.MIB  # 60,000 objects
KNOWN_MAX = 256  # (bucket, prefix) pairs whose newest listing is remembered
ONE_BY_ONE = ("az", "https", "http")  # these list from the beginning to reach any key


class _Listed:
    """The newest listing of a (bucket, prefix)."""

    def __init__(self, state: ListingState, served: Served) -> None:
        self.state, self.served = state, served
        self.stale = False  # something was written since


class _UnderWay:
    """A listing that is being made. `overtaken`: a write happened that it may have missed."""

    def __init__(self, began_s: float, served: Served, survey: Survey) -> None:
        self.began_s, self.served, self.survey = began_s, served, survey
        self.done: asyncio.Task[ListingState]
        self.overtaken = False


class Listings:
    """See the module's header."""

    def __init__(self, buckets: Buckets, pages: Pages, derived: Derived, clock: Clock, workers: Executor) -> None:
        self._buckets, self._pages, self._derived = buckets, pages, derived
        self._clock, self._workers = clock, workers
        self._known: OrderedDict[tuple[str, str], _Listed] = OrderedDict()
        self._under_way: dict[tuple[str, str], _UnderWay] = {}
        self._held: OrderedDict[str, bytes] = OrderedDict()

    # --- asking ------------------------------------------------------------------------------------------------------
    async def ask(self, call: ListingCall) -> ListingState:
        """The listing, or after WAIT_S the listing's progress. `Precondition` if it is not the one that `call.id`
        names."""
        served = await self._served(call)
        now_s = self._clock.wall_s()
        since_s = call.since_s if 0 < call.since_s <= now_s else now_s - _age_max_s(served, call.refresh)
        try:
            async with asyncio.timeout(WAIT_S):
                state = await self._since(served, call.prefix, since_s)
        except TimeoutError:
            begun = self._under_way.get((call.bucket, call.prefix))
            objects = begun.survey.objects if begun else 0
            return ListingState(call.bucket, call.prefix, objects=objects, since_s=max(since_s, 1.0))
        if call.id and call.id != state.id:
            raise await self._changed(call, state)
        return state

    async def _served(self, call: ListingCall) -> Served:
        """What is listed: a bucket, or the versions of its objects."""
        of = whose_versions(call.bucket)
        if not of:
            return await self._buckets.get(call.bucket)
        current = await self._buckets.get(of)
        if current.backend.scheme != "s3":
            raise NotSupported(
                f"bucket {of} is not on S3, and no other backend's versions are read here: name the objects by "
                "listing=, which says what has changed"
            )
        if current.bucket.write == "back" and (await self._pages.owed(current.bucket, call.prefix, "")):
            raise Precondition(
                f"the backend of {of} does not have all that was written under {call.prefix!r} yet, so that has no "
                f"version: run `forebay flush {of}/{call.prefix}`, then ask again"
            )
        return await self._buckets.readable(call.bucket, "")

    async def _since(self, served: Served, prefix: str, since_s: float) -> ListingState:
        """The newest listing, one that began at `since_s` or later."""
        name = (served.bucket.name, prefix)
        while True:
            known = self._known.get(name)
            if known is not None and self._is_good(known, served, since_s):
                self._known.move_to_end(name)
                return known.state
            begun = self._under_way.get(name)
            if begun is None:
                begun = self._begin(served, prefix)
            if begun.began_s >= since_s and not begun.overtaken and begun.served.same_place(served):
                return await asyncio.shield(begun.done)
            await asyncio.wait([begun.done])

    def _is_good(self, known: _Listed, served: Served, since_s: float) -> bool:
        if known.stale or not known.served.same_place(served) or known.state.listed_s < since_s:
            return False
        return self._is_here(known.state)

    def _is_here(self, state: ListingState) -> bool:
        if state.id in self._held:
            return True
        found = self._derived.find("listings", state.bucket, derived_key(state.prefix, state.id), state.id)
        if found is not None and not isinstance(found, bytes):
            found.release()
        return found is not None

    # --- listing -----------------------------------------------------------------------------------------------------
    def _begin(self, served: Served, prefix: str) -> _UnderWay:
        name = (served.bucket.name, prefix)

        versions = bool(whose_versions(served.bucket.name))

        async def page(after: str, limit: int) -> ListPage:
            if versions:  # nobody owes one
                return await served.backend.list_page(prefix, "", after, limit)
            found = await self._pages.page(served, ListCall(name[0], prefix, "", after, limit))
            await asyncio.sleep(0)  # an index or a memory never waits
            return found

        alone = versions or served.bucket.write == "local" or served.backend.scheme in ONE_BY_ONE
        survey = Survey(page, prefix, hands=1 if alone else HANDS)
        begun = self._under_way[name] = _UnderWay(self._clock.wall_s(), served, survey)
        begun.done = asyncio.create_task(self._list(begun, prefix))
        begun.done.add_done_callback(lambda done: self._ended(name, done))
        return begun

    def _ended(self, name: tuple[str, str], done: asyncio.Task[ListingState]) -> None:
        del self._under_way[name]
        if not done.cancelled():
            done.exception()  # whoever waited has it

    async def _list(self, begun: _UnderWay, prefix: str) -> ListingState:
        bucket = begun.served.bucket.name
        started_s = self._clock.monotonic_s()
        pieces = await begun.survey.run()
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(self._workers, build, bucket, prefix, pieces)
        listing = Listing(data)
        state = ListingState(bucket, prefix, listing.id, len(listing), len(data), begun.began_s, begun.began_s)
        took_s = self._clock.monotonic_s() - started_s
        asked = begun.survey.requests
        log.info("%s/%s: %d objects listed in %.1f s by %d requests", bucket, prefix, len(listing), took_s, asked)
        self._hold(state.id, data)
        kept = await self._derived.keep("listings", bucket, derived_key(prefix, state.id), state.id, data)
        if kept and len(data) > SMALL_BYTES_MAX:
            self._held.pop(state.id, None)
        self._learn(begun, state)
        return state

    def _hold(self, id: str, data: bytes) -> None:
        self._held[id] = data
        self._held.move_to_end(id)
        while len(self._held) > 1 and sum(map(len, self._held.values())) > HELD_BYTES_MAX:
            self._held.popitem(last=False)

    def _learn(self, begun: _UnderWay, state: ListingState) -> None:
        name = (state.bucket, state.prefix)
        self._known.pop(name, None)
        self._known[name] = _Listed(state, begun.served)
        self._known[name].stale = begun.overtaken
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def written(self, bucket: str, key: str) -> None:
        """A key was written or deleted here: earlier listings of it are stale."""
        for (name, prefix), known in self._known.items():
            if name == bucket and key.startswith(prefix):
                known.stale = True
        for (name, prefix), begun in self._under_way.items():
            if name == bucket and key.startswith(prefix):
                begun.overtaken = True

    # --- giving ------------------------------------------------------------------------------------------------------
    async def part(self, call: ListingPartCall) -> bytes:
        """Some bytes of a listing held in memory. `NotFound` if it is no longer held: ask for the listing again."""
        data = self._held.get(call.id)
        if data is None:
            raise NotFound(f"the listing {call.id} is not held any more: ask for it again", code="NoSuchListing")
        if not 0 <= call.start <= call.end <= len(data) or call.end - call.start > limits.LISTING_PART_BYTES_MAX:
            raise Invalid(
                f"a part of a listing is at most {limits.LISTING_PART_BYTES_MAX} bytes of the {len(data)} there are"
            )
        return data[call.start : call.end]

    async def load(self, bucket: str, prefix: str, id: str) -> Listing:
        """A listing that was given out before. `NotFound` if it is no longer here: ask for the listing again."""
        data = self._held.get(id)
        if data is not None:
            held = Listing(data)
            if (held.bucket, held.prefix) == (bucket, prefix):  # whoever asks may know of this place alone
                return held
        found = self._derived.find("listings", bucket, derived_key(prefix, id), id)
        if found is None:
            raise NotFound(
                f"there is no listing {id} of {bucket}/{prefix} here: ask for the listing, then try again",
                code="NoSuchListing",
            )
        if isinstance(found, bytes):
            return Listing(found)
        loop = asyncio.get_running_loop()
        try:
            data = await loop.run_in_executor(self._workers, os.pread, found.fd, found.record.size_bytes, 0)
        finally:
            found.release()
        return Listing(data)

    async def _changed(self, call: ListingCall, state: ListingState) -> Precondition:
        """The error for an asker who wants another listing than the current one."""
        place = f"{whose_versions(call.bucket) or call.bucket}/{call.prefix}"
        try:
            old = await self.load(call.bucket, call.prefix, call.id)
            new = await self.load(call.bucket, call.prefix, state.id)
            loop = asyncio.get_running_loop()
            said = str(await loop.run_in_executor(self._workers, old.difference, new))
        except ForebayError:
            said = f"it has {state.objects} objects now, and what it had then is not kept any more"
        return Precondition(
            f"{place} is not what the listing {call.id} says: {said}; start from the listing of today ({state.id}), "
            "or put back what changed",
            code="ListingChanged",
        )

    async def aclose(self) -> None:
        """End the listings."""
        tasks = [begun.done for begun in self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _age_max_s(served: Served, refresh: bool) -> float:
    """How long ago the listing may have begun."""
    if refresh or served.bucket.write == "local" or whose_versions(served.bucket.name):
        return 0.0
    return min(served.bucket.freshness_s, FRESH_IMMUTABLE)
