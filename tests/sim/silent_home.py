"""`python -m tests.sim.silent_home SEED [flush|unconditional]`: a node stands still while others wait for it.

Three nodes of the product in virtual time (`forebay/sim/nodes.py`), whose buckets have two copies. One of them gets no
turns any more. What clients had asked of its keys at the others must be answered when its lease has ended, and asked
again it must work: nobody waits for what the silent node might still say.

With `flush` the node stands still while it sends an object to the bucket. Others take over, write the object again and
flush it. Then the node goes on, and its request lands: the bucket must refuse it, since it holds another version by
now. `unconditional` plants a bug: requests have no condition.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine, Iterator
from typing import Any

from msgspec.structs import replace

from forebay.sim.scale import scale

scale()  # before the rest of the product is imported

from forebay.core.machines.delivery import Delivery  # noqa: E402
from forebay.core.machines.delivery_events import Effect, Put  # noqa: E402
from forebay.node.engine.flush.key_flush import Errand  # noqa: E402
from forebay.sim.doors import patched  # noqa: E402
from forebay.sim.nodes import AGAIN_S, Node, Nodes  # noqa: E402
from forebay.sim.world import Found  # noqa: E402

TAKEN_OVER_WITHIN_S = 2.0  # beyond the lease
LATE_S = 2.0  # here one message in fifty is late by up to a second, and several follow one another
FOR_EVER_S = 10_000.0
EACH = ("PUT", "GET", "HEAD", "DELETE")


class SilentHome(Nodes):
    """`run` it once."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        assert self.copies == 2, "seeds whose half is odd have two copies"
        self.slowest_s = 0.0

    async def _story(self) -> None:
        for node in self.nodes:
            self._begin(node)
        await self._heal()
        silent, *others = self.nodes
        keys = [(bucket, f"k{number}") for bucket in ("back", "own") for number in range(24)]
        for place in keys:
            await self._until_done(others[0], "PUT", place)
        await self._until_covered()
        engine = silent.life.engine  # type: ignore[union-attr]
        mine = [place for place in keys if engine.seat.agreed.holder(*place) == engine.node_id]  # type: ignore[union-attr]
        asked = [(other, method) for other in others for method in EACH]
        assert len(mine) >= len(asked), "enough keys for each to have one of its own"
        silent.paused_until_s = self.clock.now_s + FOR_EVER_S
        last_s = self.clock.now_s + silent.settings.lease_s + TAKEN_OVER_WITHIN_S + LATE_S
        await asyncio.gather(
            *(self._ask_until(last_s, *each, place) for each, place in zip(asked, mine, strict=False)),
            *(self._list_until(last_s, other, bucket) for other in others for bucket in ("back", "own")),
        )

    async def _until_covered(self) -> None:
        while True:
            seats = [node.life.engine.seat for node in self.nodes if node.life is not None]
            maps = [seat.agreed for seat in seats if seat is not None]
            if all(known is not None and known.is_covered and known.held > 0 for known in maps):
                return
            await asyncio.sleep(AGAIN_S)

    async def _ask_until(self, last_s: float, node: Node, method: str, place: tuple[str, str]) -> None:
        """The first answer, whatever it is, and one that is no refusal."""
        began_s = self.clock.now_s
        with contextlib.suppress(OSError):
            await self._ask_at(f"{method} {place}", node, method, "/{}/{}".format(*place), {}, b"new")
        self._check(began_s, last_s, f"{method} of {place} at {node.name} has its first answer")
        await self._until_done(node, method, place)
        self._check(began_s, last_s, f"{method} of {place} at {node.name} works again")

    async def _list_until(self, last_s: float, node: Node, bucket: str) -> None:
        began_s = self.clock.now_s
        while True:
            if (await self._ask_at(f"list {bucket}", node, "GET", f"/{bucket}", {}, None)).status == 200:
                break
            await asyncio.sleep(0.2)
        self._check(began_s, last_s, f"a listing of {bucket} at {node.name} works again")

    async def _until_done(self, node: Node, method: str, place: tuple[str, str], body: bytes = b"new") -> None:
        while True:
            with contextlib.suppress(OSError):
                who = f"{method} {place}"
                answer = await self._ask_at(who, node, method, "/{}/{}".format(*place), {}, body)
                if answer.status < 300 or (method != "PUT" and answer.status == 404):
                    return
            await asyncio.sleep(0.2)

    def _check(self, began_s: float, last_s: float, what: str) -> None:
        self.slowest_s = max(self.slowest_s, self.clock.now_s - began_s)
        if self.clock.now_s > last_s:
            raise Found(f"{what} only {self.clock.now_s - began_s:.1f} s after the home fell silent")


class LateFlush(SilentHome):
    """As the module says of a flush. `run` it once."""

    async def _story(self) -> None:
        for node in self.nodes:
            self._begin(node)
        await self._heal()
        silent, other, third = self.nodes
        engine: Any = silent.life.engine  # type: ignore[union-attr]
        names = [("back", f"k{number}") for number in range(64)]
        place = next(name for name in names if engine.seat.agreed.holder(*name) == engine.node_id)
        await self._until_covered()
        self.service.set_mood("slow")
        await self._until_done(other, "PUT", place, b"old")
        await self._until_sending(engine, place, True)
        silent.paused_until_s = self.clock.now_s + FOR_EVER_S
        self.service.set_mood("fine")
        await self._until_done(other, "PUT", place, b"newer")
        await self._until_in_bucket(place, b"newer")
        silent.paused_until_s = self.clock.now_s
        await self._until_sending(engine, place, False)
        await self._heal()
        for node in (silent, other, third):
            found = await self._ask_at("reader", node, "GET", "/{}/{}".format(*place), {}, None)
            if (found.status, found.body) != (200, b"newer"):
                raise Found(f"{node.name} has {found.status} {found.body!r}")
        await self._until_in_bucket(place, b"newer")

    async def _until_sending(self, engine: Any, place: tuple[str, str], wanted: bool) -> None:
        """Until a request that cannot be taken back is under way, or none is."""
        while True:
            flight = engine.flusher._of[place[0]].flights.get(place[1])
            if wanted == (flight is not None and flight.errand is not None and not flight.errand.is_cancellable):
                return
            await asyncio.sleep(0.01)

    async def _until_in_bucket(self, place: tuple[str, str], body: bytes) -> None:
        memory = self.service.memory[place[0]]
        for _ in range(600):
            with contextlib.suppress(KeyError):
                if memory._objects[place[1]][1] == body:
                    return
            await asyncio.sleep(AGAIN_S)
        raise Found(f"the bucket has {memory._objects.get(place[1])}, and the newest is {body!r}")


@contextlib.contextmanager
def unconditional() -> Iterator[None]:
    """Two bugs: no request of a flush has a condition, and none is cut off when others may act in its node's place."""

    async def goes_on(errand: Errand, request: Coroutine[Any, Any, Any]) -> Any:
        return await request

    real = Delivery._request

    def request(delivery: Delivery, *, looked: bool = False) -> list[Effect]:
        return [replace(each, expect=None) if isinstance(each, Put) else each for each in real(delivery, looked=looked)]

    with patched([(Delivery, "_request", request), (Errand, "_unless_cut_off", goes_on)]):
        yield


if __name__ == "__main__":
    seed, about = int(sys.argv[1]), sys.argv[2:]
    world = LateFlush(seed) if about else SilentHome(seed)
    try:
        with unconditional() if about == ["unconditional"] else contextlib.nullcontext():
            world.run()
    except AssertionError:
        print("\n".join(world.lines[-60:]))
        raise
    print("refused" if about else f"{world.slowest_s:.1f} s")
