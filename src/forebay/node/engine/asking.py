"""Asking again while the cluster's map changes: the one layer that does.

Theory. Nodes come and go as planned, and for moments the nodes go by different maps, or a key is on its way from one to
another. Who is asked meanwhile, and is not the one who acts, does nothing and says so (`errors.map_changes`; between
nodes the status AGAIN_STATUS). Then asking again, by the map of then, is safe for reads and writes alike.

The node that a client asked does that. It holds the whole body of a write in a file until the write has its answer, so
it can send it to another. A node that another asks passes such an error on: two that ask again would multiply. So does
`backends/wrap/retrying.py`, since its backend is a node by one map. What may have been done is no such error, and is
the client's to judge.

It asks again when this node knows of another map; else after pauses that double, since the other node may be the one
that is behind, or waits for a flush, or for something that it takes over.

Rejected: waiting for the map that the other node names (it may be the one that is behind, and the key may be free
before); a node that is asked waits itself (it would hold the other's lock, and a place in its own queue).

Invariants. (1) Nothing is asked again that may have been done: an error of this kind is of the request that would have
done it, never of one that follows (`S3Writes._made`). (2) Nobody is held longer than AGAIN_FOR_S by this.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from forebay.core.cluster.membership import LOOK_S
from forebay.core.errors import MAP_CHANGES, ForebayError
from forebay.node.engine.seat import Seat
from forebay.ports.clock import Clock

ResultT = TypeVar("ResultT")

AGAIN_FOR_S = 10.0  # a drained node hands over in seconds, and a lease ends within it
FIRST_S = 0.01  # the first pause: nodes hear of a map within milliseconds of each other


class Patience:
    """Of one operation."""

    def __init__(self, seat: Seat, clock: Clock) -> None:
        self._seat, self._clock = seat, clock
        self._until_s = clock.monotonic_s() + AGAIN_FOR_S
        self._pause_s = FIRST_S

    def is_for(self, code: str) -> bool:
        """Whether what failed with this code is to be asked again."""
        return code == MAP_CHANGES and self._clock.monotonic_s() < self._until_s

    async def pause(self) -> None:
        """Return when it is time to."""
        await self._seat.next_map(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LOOK_S)

    async def again(self, act: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """What `act` returns, asked until it does; or what it raises that asking again does not mend."""
        while True:
            try:
                return await act()
            except ForebayError as error:
                if not self.is_for(error.code):
                    raise
            await self.pause()
