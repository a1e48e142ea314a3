"""Hints from a job to the node: the exact future of its reads, and how far it is.

Theory. A loader knows its order, so it tells the node what it will read next, and now and then its position. The node
fetches ahead and keeps what is needed soonest (docs/semantics.md). Hints name objects by their number in the job's
listing, and blocks of them, in the order of reading.

Hints are advice. A restarted node has forgotten them and answers `at` with `NotFound` (`NoSuchHints`): send the future
again, from the current position. One process of a job speaks for all of it.

Invariant. Accesses are sent in order, in pieces of at most PIECE_ACCESSES.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any

import msgspec

from forebay.client import flows
from forebay.core.errors import Corrupt, Invalid
from forebay.core.formats.listing import Listing
from forebay.core.machines.hints import TRIPLE_BYTES, HintsCall, HintsState
from forebay.core.messages.http1 import Request, encode_path, with_query

PIECE_ACCESSES = 1 << 18  # 3 MiB

Accesses = Iterable[tuple[int, int, int]] | bytes | bytearray | memoryview | array  # type: ignore[type-arg]


def pack(accesses: Any) -> memoryview:
    """Accesses as they are told: u32 triples (object's number, first block, end block), little-endian. A buffer of
    4-byte integers (a NumPy array of shape (n, 3), say) is taken as it is. `Invalid` for anything else."""
    try:
        view = memoryview(accesses)
    except TypeError:
        view = memoryview(array("I", [number for access in accesses for number in access]))
    if not view.c_contiguous or (view.itemsize != 4 and view.format not in ("B", "b", "c")):
        raise Invalid("accesses are given as triples, or as an array of uint32 in C order")
    view = view.cast("B") if view.nbytes else memoryview(b"")
    if len(view) % TRIPLE_BYTES:
        raise Invalid("accesses are triples: object's number, first block, end block")
    return view


def tell(job: str, listing: Listing, start: int, accesses: memoryview, use_bytes: int = 0) -> flows.Flow[HintsState]:
    """From access `start` on the job reads these, as `pack` made them, and of each block so many bytes (0: all). What
    was told before of `start` and later no longer holds."""
    step = PIECE_ACCESSES * TRIPLE_BYTES
    state: HintsState | None = None
    for at in range(0, len(accesses) or 1, step):
        first = start + at // TRIPLE_BYTES
        piece = bytes(accesses[at : at + step])
        body = msgspec.msgpack.encode(
            HintsCall(job, listing.bucket, listing.prefix, listing.id, first, piece, use_bytes=use_bytes)
        )
        headers = (("Content-Type", "application/msgpack"),)
        state = yield from _state(Request("POST", encode_path("-/v1/hints", job), headers, body), job)
    assert state is not None
    return state


def at(job: str, position: int) -> flows.Flow[HintsState]:
    """The job has consumed the accesses before `position`."""
    target = with_query(encode_path("-/v1/hints", job), (("position", str(position)),))
    return (yield from _state(Request("PUT", target), job))


def state(job: str) -> flows.Flow[HintsState]:
    """What the node knows of the job."""
    return (yield from _state(Request("GET", encode_path("-/v1/hints", job)), job))


def close(job: str) -> flows.Flow[None]:
    """The job is over; one that the node does not know is fine."""
    response = yield Request("DELETE", encode_path("-/v1/hints", job))
    if not response.ok:
        raise flows.raised(response, f"hints of {job}")


def _state(request: Request, job: str) -> flows.Flow[HintsState]:
    response = yield request
    if not response.ok:
        raise flows.raised(response, f"hints of {job}")
    try:
        return msgspec.json.decode(response.body, type=HintsState)
    except msgspec.DecodeError as error:
        raise Corrupt(f"hints of {job}: the answer is not of the shape expected ({error})") from None


class Hints:
    """One job's hints, as blocking calls. Made by `Client.hints`; close it when the job ends, or use it with `with`."""

    def __init__(self, run: Callable[[Any], Any], job: str, listing: Listing) -> None:
        self.job, self.listing = job, listing
        self.known = 0  # accesses told so far
        self._run = run

    def __enter__(self) -> Hints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def future(self, accesses: Accesses, start: int | None = None, use_bytes: int = 0) -> HintsState:
        """Tell what is read from access `start` on (by default after what was told), as triples of an object's number
        in the listing, its first block and its end block, or a uint32 array of them. `use_bytes`: how many bytes of a
        block an access reads on average, so that the node fetches no block of which too little is read; 0: all. Telling
        an epoch ahead of the position lets the node choose best. `Invalid` beyond HINT_ACCESSES_MAX ahead; `NotFound`
        when the node has not got the listing any more."""
        said: HintsState = self._run(
            tell(self.job, self.listing, self.known if start is None else start, pack(accesses), use_bytes)
        )
        self.known = said.known
        return said

    def at(self, position: int) -> HintsState:
        """The job has consumed the accesses before `position`. A round trip of a third of a millisecond: say it every
        few batches. `NotFound` (`NoSuchHints`): the node was restarted, tell the future again."""
        said: HintsState = self._run(at(self.job, position))
        return said

    def state(self) -> HintsState:
        """What the node knows of the job."""
        said: HintsState = self._run(state(self.job))
        return said

    def close(self) -> None:
        """The job is over: what it needed competes like anything else."""
        self._run(close(self.job))


class HintsAsync:
    """`Hints` as coroutines. Made by `forebay.aio.Client.hints`; close it when the job ends, or use `async with`."""

    def __init__(self, run: Callable[[Any], Awaitable[Any]], job: str, listing: Listing) -> None:
        self.job, self.listing = job, listing
        self.known = 0  # accesses told so far
        self._run = run

    async def __aenter__(self) -> HintsAsync:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()

    async def future(self, accesses: Accesses, start: int | None = None, use_bytes: int = 0) -> HintsState:
        """See `Hints.future`."""
        said: HintsState = await self._run(
            tell(self.job, self.listing, self.known if start is None else start, pack(accesses), use_bytes)
        )
        self.known = said.known
        return said

    async def at(self, position: int) -> HintsState:
        """See `Hints.at`."""
        said: HintsState = await self._run(at(self.job, position))
        return said

    async def state(self) -> HintsState:
        """What the node knows of the job."""
        said: HintsState = await self._run(state(self.job))
        return said

    async def aclose(self) -> None:
        """The job is over: what it needed competes like anything else."""
        await self._run(close(self.job))
