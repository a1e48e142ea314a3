"""Manifests: one listing for all who ask, and what is kept of it.

Theory. A job's ranks and workers all want the same listing at the same time. The first to ask starts it
(`read/parallel_listing.py`, page by page through `Listings`, so that it includes what only this node has); the others
wait for it. Whoever comes within the bucket's freshness gets the same manifest. As with reads, a listing counts from
the moment it began: an asker who needs a later one waits for the one under way and shares the next.

A manifest is kept as a derived object under its bucket, prefix and id, and the fronts send it from there. If the store
has no room for it, memory holds it (HELD_BYTES_MAX, but always the newest), and it is sent from there in parts. Earlier
manifests stay in the store until they are evicted; while one is there, the node can say what changed since.

Nobody waits silently for long: after WAIT_S the answer is the listing's progress, and the asker asks again.

A write through this node makes the manifests of its key stale at once, whatever the freshness: a writer sees its own
writes. Local buckets are listed anew for every asker, from the index. The index, and backends that cannot start at an
arbitrary key, are listed page after page.

Invariants. (1) At most one listing of a (bucket, prefix) is under way. (2) A manifest is given out only while the
bucket is the place that was listed. (3) An asker never gets a listing that began before the moment it needs.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from concurrent.futures import Executor

from forebay.core import limits
from forebay.core.errors import ForebayError, Invalid, NotFound, Precondition
from forebay.core.formats.manifest import Manifest, ManifestCall, ManifestPartCall, ManifestState, build, derived_key
from forebay.core.messages.calls import ListCall
from forebay.core.types import FRESH_IMMUTABLE, ListPage
from forebay.node.engine.buckets import Buckets, Served
from forebay.node.engine.read.listing import Listings
from forebay.node.engine.read.parallel_listing import HANDS, Survey
from forebay.node.store.derived import Derived
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.manifests")

WAIT_S = 10.0
HELD_BYTES_MAX = 128 * limits.MIB
KNOWN_MAX = 256  # (bucket, prefix) pairs whose newest manifest is remembered
ONE_BY_ONE = ("az", "https", "http")  # these list from the beginning to reach any key


class _Listed:
    """The newest manifest of a (bucket, prefix)."""

    def __init__(self, state: ManifestState, served: Served) -> None:
        self.state, self.served = state, served
        self.stale = False  # something was written since


class _Listing:
    """A listing under way. `overtaken`: a write happened that it may have missed."""

    def __init__(self, began_s: float, served: Served, survey: Survey) -> None:
        self.began_s, self.served, self.survey = began_s, served, survey
        self.done: asyncio.Task[ManifestState]
        self.overtaken = False


class Manifests:
    """See the module's header."""

    def __init__(self, buckets: Buckets, listings: Listings, derived: Derived, clock: Clock, workers: Executor) -> None:
        self._buckets, self._listings, self._derived = buckets, listings, derived
        self._clock, self._workers = clock, workers
        self._known: OrderedDict[tuple[str, str], _Listed] = OrderedDict()
        self._listing: dict[tuple[str, str], _Listing] = {}
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self.listed_objects = 0

    # --- asking ------------------------------------------------------------------------------------------------------
    async def ask(self, call: ManifestCall) -> ManifestState:
        """The manifest, or after WAIT_S the listing's progress. `Precondition` if it is not the one that `call.id`
        names."""
        served = await self._buckets.get(call.bucket)
        now_s = self._clock.wall_s()
        since_s = call.since_s if 0 < call.since_s <= now_s else now_s - _age_max_s(served, call.refresh)
        try:
            async with asyncio.timeout(WAIT_S):
                state = await self._since(served, call.prefix, since_s)
        except TimeoutError:
            listing = self._listing.get((call.bucket, call.prefix))
            objects = listing.survey.objects if listing else 0
            return ManifestState(call.bucket, call.prefix, objects=objects, since_s=max(since_s, 1.0))
        if call.id and call.id != state.id:
            raise await self._changed(call, state)
        return state

    async def _since(self, served: Served, prefix: str, since_s: float) -> ManifestState:
        """A manifest from a listing that began at `since_s` or later."""
        name = (served.bucket.name, prefix)
        while True:
            known = self._known.get(name)
            if known is not None and self._is_good(known, served, since_s):
                self._known.move_to_end(name)
                return known.state
            listing = self._listing.get(name)
            if listing is None:
                listing = self._begin(served, prefix)
            if listing.began_s >= since_s and not listing.overtaken and listing.served.same_place(served):
                return await asyncio.shield(listing.done)
            await asyncio.wait([listing.done])

    def _is_good(self, known: _Listed, served: Served, since_s: float) -> bool:
        if known.stale or not known.served.same_place(served) or known.state.listed_s < since_s:
            return False
        return self._is_here(known.state)

    def _is_here(self, state: ManifestState) -> bool:
        if state.id in self._held:
            return True
        found = self._derived.find("manifests", state.bucket, derived_key(state.prefix, state.id), state.id)
        if found is not None and not isinstance(found, bytes):
            found.release()
        return found is not None

    # --- listing -----------------------------------------------------------------------------------------------------
    def _begin(self, served: Served, prefix: str) -> _Listing:
        name = (served.bucket.name, prefix)

        async def page(after: str, limit: int) -> ListPage:
            found = await self._listings.page(served, ListCall(name[0], prefix, "", after, limit))
            await asyncio.sleep(0)  # an index or a memory never waits
            return found

        alone = served.bucket.write == "local" or served.backend.scheme in ONE_BY_ONE
        survey = Survey(page, prefix, hands=1 if alone else HANDS)
        listing = self._listing[name] = _Listing(self._clock.wall_s(), served, survey)
        listing.done = asyncio.create_task(self._list(listing, prefix))
        listing.done.add_done_callback(lambda done: self._ended(name, done))
        return listing

    def _ended(self, name: tuple[str, str], done: asyncio.Task[ManifestState]) -> None:
        del self._listing[name]
        if not done.cancelled():
            done.exception()  # whoever waited has it

    async def _list(self, listing: _Listing, prefix: str) -> ManifestState:
        bucket = listing.served.bucket.name
        started_s = self._clock.monotonic_s()
        pieces = await listing.survey.run()
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(self._workers, build, bucket, prefix, pieces)
        manifest = Manifest(data)
        state = ManifestState(bucket, prefix, manifest.id, len(manifest), len(data), listing.began_s, listing.began_s)
        self.listed_objects += len(manifest)
        took_s = self._clock.monotonic_s() - started_s
        asked = listing.survey.requests
        log.info("%s/%s: %d objects listed in %.1f s by %d requests", bucket, prefix, len(manifest), took_s, asked)
        self._hold(state.id, data)
        if await self._derived.keep("manifests", bucket, derived_key(prefix, state.id), state.id, data):
            del self._held[state.id]
        self._learn(listing, state)
        return state

    def _hold(self, id: str, data: bytes) -> None:
        self._held[id] = data
        self._held.move_to_end(id)
        while len(self._held) > 1 and sum(map(len, self._held.values())) > HELD_BYTES_MAX:
            self._held.popitem(last=False)

    def _learn(self, listing: _Listing, state: ManifestState) -> None:
        name = (state.bucket, state.prefix)
        self._known.pop(name, None)
        self._known[name] = _Listed(state, listing.served)
        self._known[name].stale = listing.overtaken
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def written(self, bucket: str, key: str) -> None:
        """A key was written or deleted here: earlier listings of it are stale."""
        for (name, prefix), known in self._known.items():
            if name == bucket and key.startswith(prefix):
                known.stale = True
        for (name, prefix), listing in self._listing.items():
            if name == bucket and key.startswith(prefix):
                listing.overtaken = True

    # --- giving ------------------------------------------------------------------------------------------------------
    async def part(self, call: ManifestPartCall) -> bytes:
        """Some bytes of a manifest held in memory. `NotFound` if it is no longer held: ask for the manifest again."""
        data = self._held.get(call.id)
        if data is None:
            raise NotFound(f"the manifest {call.id} is not held any more: ask for it again", code="NoSuchManifest")
        if not 0 <= call.start <= call.end <= len(data) or call.end - call.start > limits.MANIFEST_PART_BYTES_MAX:
            raise Invalid(
                f"a part of a manifest is at most {limits.MANIFEST_PART_BYTES_MAX} bytes of the {len(data)} there are"
            )
        return data[call.start : call.end]

    async def load(self, bucket: str, prefix: str, id: str) -> Manifest:
        """A manifest that was given out before. `NotFound` if it is no longer here: ask for the manifest again."""
        data = self._held.get(id)
        if data is None:
            found = self._derived.find("manifests", bucket, derived_key(prefix, id), id)
            if found is None:
                raise NotFound(
                    f"there is no manifest {id} of {bucket}/{prefix} here: ask for the manifest, then try again",
                    code="NoSuchManifest",
                )
            if isinstance(found, bytes):
                data = found
            else:
                loop = asyncio.get_running_loop()
                try:
                    data = await loop.run_in_executor(self._workers, os.pread, found.fd, found.record.size_bytes, 0)
                finally:
                    found.release()
        return Manifest(data)

    async def _changed(self, call: ManifestCall, state: ManifestState) -> Precondition:
        """The error for an asker who wants another manifest than the current one."""
        place = f"{call.bucket}/{call.prefix}"
        try:
            old = await self.load(call.bucket, call.prefix, call.id)
            new = await self.load(call.bucket, call.prefix, state.id)
            loop = asyncio.get_running_loop()
            said = str(await loop.run_in_executor(self._workers, old.difference, new))
        except ForebayError:
            said = f"it has {state.objects} objects now, and what it had then is not kept any more"
        return Precondition(
            f"{place} is not what the manifest {call.id} says: {said}; start from the manifest of today ({state.id}), "
            "or put back what changed",
            code="ManifestChanged",
        )

    async def aclose(self) -> None:
        """End the listings."""
        tasks = [listing.done for listing in self._listing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _age_max_s(served: Served, refresh: bool) -> float:
    """How long ago the listing may have begun."""
    if refresh or served.bucket.write == "local":
        return 0.0
    return min(served.bucket.freshness_s, FRESH_IMMUTABLE)
