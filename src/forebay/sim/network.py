"""What lies between the nodes of a simulated cluster, and between each of them and what they agree on.

Theory. Nodes ask each other with the product's own blocking HTTP client, which runs in threads. Here a thread is a
greenlet: where it would wait for its socket it gives way, and goes on when the socket of this kernel is ready.
So requests between nodes are under way while everything else goes on, and nothing of them is made up but time. A link
can be cut in one direction or in both: what is sent then waits, and whoever waits too long loses its patience, as with
a network that drops packets.

The store that nodes agree on is `Agreed` (`sim/agreed.py`), behind links of the same kind.

Rejected: a backend for nodes in memory (a second client of S3, which would be simulated in place of the product's).

Invariants. (1) Nothing that was sent is changed or lost while its connection lasts. (2) At most as many pieces of work
of a pool are under way as it has threads.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import aclosing, contextmanager
from random import Random
from typing import Any

import greenlet

from forebay.backends.http import bodies, cloud
from forebay.core.errors import Unavailable
from forebay.meta.seam import Entry, Heard, Lease
from forebay.node.engine import engine
from forebay.sim.agreed import Agreed, MemoryMeta
from forebay.sim.doors import Patch, patched
from forebay.sim.loop import Killed

STORE = "etcd"  # the name of what nodes agree on, as an end of links
LOOK_S = 0.25  # between looks at a link that is cut
PATIENCE_S = 3.0  # of a node with the store
DELAY_S = 0.01
_Socket = socket.socket


class Network:
    """Links between named hosts. `where` says at which socket the host at a port listens, and which host that is."""

    def __init__(self, chance: Random, here: Callable[[], str], where: Callable[[int], tuple[str, str]]) -> None:
        self._chance, self._here, self._where = chance, here, where
        self._cut: set[tuple[str, str]] = set()
        self._relays: list[tuple[set[str], socket.socket]] = []
        self.opened: Callable[[socket.socket], None] = lambda connection: None

    def cut(self, sender: str, receiver: str) -> None:
        """Nothing that `sender` sends arrives at `receiver` from now on."""
        self._cut.add((sender, receiver))
        for ends, connection in self._relays:
            if {sender, receiver} == ends and connection.fileno() >= 0:
                connection.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        self._cut.clear()

    def is_cut(self, sender: str, receiver: str) -> bool:
        return (sender, receiver) in self._cut

    def delay_s(self) -> float:
        """How long a message is under way."""
        return DELAY_S * self._chance.random() ** 2 if self._chance.random() < 0.98 else self._chance.random()

    @contextmanager
    def installed(self, store: Callable[[], MemoryMeta]) -> Iterator[None]:
        """For as long as this lasts, connections of blocking code lie in this network, and nodes agree in `store`."""
        whole: Any = cloud.CloudReads
        replaced: list[Patch] = [
            (socket, "create_connection", self._dial),
            (bodies, "ThreadPoolExecutor", lambda most, thread_name_prefix="": _Threads(most, self.delay_s)),
            (engine, "EtcdMeta", lambda addresses, name, access=None: store()),
        ]
        whole.by_wire = property(lambda reads: True, lambda reads, given: None)  # nothing goes through obstore
        try:
            with patched(replaced):
                yield
        finally:
            del whole.by_wire

    async def dial(self, host: str, port: int) -> socket.socket:
        """A connection of a front, which does not block. A cut breaks it; what it carries is not under way for long."""
        here, (there, path) = self._here(), self._where(port)
        wait_s = self.delay_s()
        while wait_s:
            await asyncio.sleep(wait_s)
            wait_s = LOOK_S if self.is_cut(here, there) or self.is_cut(there, here) else 0.0
        connection = _Socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        self.opened(connection)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            raise
        self._relays = [each for each in self._relays if each[1].fileno() >= 0]
        self._relays.append(({here, there}, connection))
        return connection

    def _dial(self, address: tuple[str, int], timeout: Any = None, source_address: Any = None) -> socket.socket:
        there, path = self._where(address[1])
        connection = _Connection(self, self._here(), there)
        connection.settimeout(timeout)
        self.opened(connection)
        try:
            connection.pass_on(there, self._here())
            connection.pass_on(self._here(), there)
            connection.connect(path)
        except FileNotFoundError:
            connection.close()
            raise ConnectionRefusedError(f"nobody listens at {there}") from None
        except OSError:
            connection.close()
            raise
        return connection


class _Connection(_Socket):
    """A socket that seems to block: it gives way instead."""

    def __init__(self, network: Network, here: str, there: str) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self.setblocking(False)
        self._network, self._sends, self._receives = network, (here, there), (there, here)
        self._patience_s: float | None = None
        self._heard = False

    def settimeout(self, value: float | None) -> None:
        self._patience_s = value

    def setsockopt(self, *options: Any) -> None:
        """Those are of TCP."""

    def pass_on(self, sender: str, receiver: str) -> None:
        """Wait while the link is cut."""
        waited_s = 0.0
        while self._network.is_cut(sender, receiver):
            if self._patience_s is not None and waited_s >= self._patience_s:
                raise TimeoutError("timed out")
            _sleep(LOOK_S)
            waited_s += LOOK_S

    def sendall(self, data: Any, flags: int = 0) -> None:
        self._heard = False
        _sleep(self._network.delay_s())
        left = memoryview(data).cast("B")
        while left:
            self.pass_on(*self._sends)
            try:
                left = left[self.send(left) :]
            except BlockingIOError:
                self._wait(writes=True)

    def sendfile(self, file: Any, offset: int = 0, count: int | None = None) -> int:
        assert count is not None
        data = os.pread(file.fileno(), count, offset)
        self.sendall(data)
        return len(data)

    def recv_into(self, *arguments: Any) -> int:
        if not self._heard:
            self._heard = True
            _sleep(self._network.delay_s())
        while True:
            self.pass_on(*self._receives)
            try:
                return super().recv_into(*arguments)
            except BlockingIOError:
                self._wait(writes=False)

    def _wait(self, *, writes: bool) -> None:
        loop, me = asyncio.get_running_loop(), greenlet.getcurrent()
        number = self.fileno()
        (loop.add_writer if writes else loop.add_reader)(number, me.switch, True)
        timer = None if self._patience_s is None else loop.call_later(self._patience_s, me.switch, False)
        is_ready = _give_way()
        (loop.remove_writer if writes else loop.remove_reader)(number)
        if timer is not None:
            timer.cancel()
        if not is_ready:
            raise TimeoutError("timed out")


def _sleep(delay_s: float) -> None:
    me = greenlet.getcurrent()
    asyncio.get_running_loop().call_later(delay_s, me.switch)
    _give_way()


def _give_way() -> Any:
    """Let everything else go on until somebody switches back; what they say."""
    loops = greenlet.getcurrent().parent
    assert loops is not None
    return loops.switch()


class _Threads(Executor):
    """Up to `most` threads that give way where they would block."""

    def __init__(self, most: int, delay_s: Callable[[], float]) -> None:
        self._free, self._delay_s = most, delay_s
        self._waiting: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        assert not named
        future: Future[Any] = Future()
        self._waiting.append((future, work, arguments))
        asyncio.get_running_loop().call_later(self._delay_s(), self._begin)
        return future

    def _begin(self) -> None:
        if self._free and self._waiting:
            self._free -= 1
            greenlet.greenlet(self._do).switch(*self._waiting.popleft())

    def _do(self, future: Future[Any], work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                result = work(*arguments)
            except (AssertionError, Killed, greenlet.GreenletExit):
                raise  # a finding or an end, not an outcome
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        self._free += 1
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._begin)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """What was submitted is still done."""


class AgreedFar(MemoryMeta):
    """The store, as a node reaches it. `ends` are the ends of leases, on the loop `beyond`, which outlives the node."""

    def __init__(
        self,
        agreed: Agreed,
        network: Network,
        here: str,
        beyond: asyncio.AbstractEventLoop,
        ends: dict[int, tuple[float, asyncio.TimerHandle]],
    ) -> None:
        super().__init__(agreed)
        self._network, self._here, self._beyond, self._ends = network, here, beyond, ends

    async def _travel(self, sender: str, receiver: str, patience_s: float = PATIENCE_S) -> None:
        until_s = self._beyond.time() + patience_s
        while self._beyond.time() < until_s:
            if not self._network.is_cut(sender, receiver):
                await asyncio.sleep(self._network.delay_s())
                return
            await asyncio.sleep(LOOK_S)
        raise Unavailable("the store does not answer")

    async def get(self, key: str) -> Entry | None:
        await self._travel(self._here, STORE)
        found = await super().get(key)
        await self._travel(STORE, self._here)
        return found

    async def range(self, prefix: str) -> tuple[list[Entry], int]:
        await self._travel(self._here, STORE)
        found = await super().range(prefix)
        await self._travel(STORE, self._here)
        return found

    async def put(self, key: str, value: bytes, *, revision: int | None = None, lease: int = 0) -> int:
        return await self.transact({key: value}, when={} if revision is None else {key: revision}, lease=lease)

    async def delete(self, key: str, *, revision: int | None = None) -> bool:
        await self._travel(self._here, STORE)
        done = await super().delete(key, revision=revision)
        await self._travel(STORE, self._here)
        return done

    async def transact(
        self, changes: Mapping[str, bytes | None], *, when: Mapping[str, int] | None = None, lease: int = 0
    ) -> int:
        await self._travel(self._here, STORE)
        revision = await super().transact(changes, when=when, lease=lease)
        await self._travel(STORE, self._here)
        return revision

    async def watch(self, prefix: str) -> AsyncGenerator[Heard, None]:
        await self._travel(self._here, STORE, math.inf)
        async with aclosing(super().watch(prefix)) as told:
            async for heard in told:
                await self._travel(STORE, self._here, math.inf)
                yield heard

    async def grant(self, ttl_s: float) -> Lease:
        await self._travel(self._here, STORE)
        lease = await super().grant(ttl_s)
        await self._travel(STORE, self._here)
        return lease

    async def renew(self, lease: int) -> None:
        await self._travel(self._here, STORE)
        await super().renew(lease)
        await self._travel(STORE, self._here)

    async def revoke(self, lease: int) -> None:
        await self._travel(self._here, STORE)
        await super().revoke(lease)
        await self._travel(STORE, self._here)

    async def aclose(self) -> None:
        """The store goes on, and so do leases."""

    def _last(self, lease: int, ttl_s: float) -> None:
        self._ends[lease] = ttl_s, self._beyond.call_later(ttl_s + self._network.delay_s(), self._end, lease)
