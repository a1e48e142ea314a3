"""One life of a node: its engine and a front in one process, from a start to a stop or a kill.

Theory. Engine and front are the product's, put together as `node/process/engine.py` does with `--fronts 0`, on a loop
of their own in virtual time. A kill leaves the loop as it is, with all that was under way: nothing of it runs again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from forebay.node.engine.buckets import OpenBackend
from forebay.node.engine.engine import Engine
from forebay.node.front.front import Front
from forebay.node.settings import Settings
from forebay.sim.loop import VirtualClock, VirtualLoop
from forebay.sim.pools import SimThreads


class Life:
    """`run` coroutines on its loop, `start` and `stop` among them, until it is killed."""

    def __init__(
        self,
        settings: Settings,
        opener: OpenBackend,
        clock: VirtualClock,
        threads: SimThreads,
        broke: Callable[[dict[str, Any]], None],
        is_dead: Callable[[], bool],
        *,
        alone: bool = True,
    ) -> None:
        self.settings, self._opener = settings, opener
        self.loop = VirtualLoop(clock, lambda: threads.pool(32, "default"), is_dead, alone=alone)
        self.loop.set_exception_handler(lambda _, context: broke(context))
        self._threads = threads
        threads.loop, threads.serves = self.loop, False
        self.engine: Engine
        self.front: Front

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run the loop until `work` is done."""
        asyncio.set_event_loop(self.loop)
        return self.loop.run_until_complete(work)

    @property
    def is_up(self) -> bool:
        """Whether it serves."""
        return self._threads.serves

    @property
    def address(self) -> str:
        return str(self.settings.run_dir / "http.sock")

    async def start(self) -> None:
        """Serve. Raises what keeps it from starting."""
        self.engine = Engine(self.settings, opener=self._opener)
        await self.engine.start()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        path = self.settings.run_dir / "http.sock"
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        self.front = Front(self.settings, 0)
        await self.front.start(listener)
        self._threads.serves = True

    async def stop(self, *, flush: bool) -> None:
        """As at SIGTERM."""
        self._threads.serves = False
        await self.front.stop(1.0)
        await self.engine.stop(flush=flush)
