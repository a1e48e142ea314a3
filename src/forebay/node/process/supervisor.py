"""The supervisor: starts a node's processes, restarts what dies, and stops them when it is stopped.

Theory. It does nothing else, so that it does not die. It holds the directory's lock and the port: after a probe
without SO_REUSEPORT has shown that no stranger listens, a bound socket that never listens keeps others out while fronts
come and go (the kernel hands connections only to listening sockets). Port 0 is settled here, for all fronts to share.

Each child is a fresh interpreter (`node/process/child.py`). One that ends is started again after a delay that doubles
from RESTART_MIN_S to RESTART_MAX_S and is forgotten after STEADY_S of life. One that says EXIT_REFUSED on its first
start ends the node with its message: nothing would change by trying again. Later it is tried again, since a disk or a
file may come back. One that hangs (`core/machines/pulse.py`: each beats on its standard input, a socket) is killed, and
then as one that died; one that starts or stops is given the time that it takes. How often which was started again is
told to the engine, a line of JSON each time, which counts it among its metrics.

SIGHUP never ends a node. The supervisor reopens its log and passes the signal on to its children, which do the same and
read identities and certificates anew. It also puts the log aside when that has grown.

`node.json` in DIR/run appears when the node is ready (engine up, every front listening) and goes when it stops.

A service manager is told of all this (`service.py`).

A supervisor that is killed takes its children along (`node/process/child.py`), but not within the same instant: the
next one waits for the last of them before it touches the port or a volume.

Invariants. (1) No child outlives the supervisor. (2) While a node runs its lock is held, and
the lock's holder is the process in `node.json`. (3) One node per directory, one listener group per address.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

import forebay
from forebay.core.errors import Busy, Exists, Invalid
from forebay.core.machines.pulse import Pulse, interval_s
from forebay.node.front.http.accounts import make_shared
from forebay.node.last_start import check_not_looser, remember
from forebay.node.process.child import EXIT_REFUSED
from forebay.node.process.logs import Log
from forebay.node.process.service import VARIABLES, ServiceManager
from forebay.node.settings import Settings
from forebay.ports import machine
from forebay.ports.clock import Clock
from forebay.ports.clock import system as system_clock

log = logging.getLogger("forebay.supervisor")

RESTART_MIN_S = 0.1
RESTART_MAX_S = 10.0
STEADY_S = 30.0
LAST_RUN_END_S = 60.0  # a killed process ends at once, but not before a disk has answered what it was asked
STOP_TIMEOUT_S = 20.0  # for a child to finish what it is sending and sync; then it is killed
READY_POLL_S = 0.02
LOG_LOOK_S = 5.0  # between looks at how long the log is


class Lock:
    """The directory's lock. `Exists` if another node holds it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Invalid(
                f"{path.parent} cannot be used ({error}): give a directory you may write, with --dir"
            ) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise Exists(
                f"a node runs from {path.parent} already: use it (`forebay status`), stop it (`forebay down`), or give "
                "another --dir"
            ) from None

    def release(self) -> None:
        os.close(self._fd)


async def last_run_ended(settings: Settings, clock: Clock, patience_s: float = LAST_RUN_END_S) -> None:
    """Return once no child of a supervisor that was killed lives. `Busy` if one does after `patience_s`.

    For whoever holds the directory's `Lock`: only then are there no others.
    """
    path = settings.children_lock
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    give_up_s: float | None = None
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pass
            if give_up_s is None:
                give_up_s = clock.monotonic_s() + patience_s
                log.warning("waiting until the node's last run has ended: %s", _others_with(path))
            if clock.monotonic_s() >= give_up_s:
                raise Busy(
                    f"processes of the node's last run from {settings.dir} have not ended ({_others_with(path)}): "
                    "one may wait for a disk that does not answer; end them with `kill -9`, or see to the disk, and "
                    "start the node again"
                )
            await asyncio.sleep(READY_POLL_S)
    finally:
        os.close(fd)


def _others_with(path: Path) -> str:
    pids = [str(pid) for pid in machine.pids_with(str(path.resolve())) if pid != os.getpid()]
    return f"pid {', '.join(pids)}" if pids else "their pids cannot be seen"


def hold_port(settings: Settings) -> tuple[socket.socket, Settings]:
    """A bound, never listening socket that keeps the address, and the settings with the port it got.

    `Exists` if somebody listens there, `Invalid` if the address is not ours.
    """
    host, port = settings.host, settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            address = probe.getsockname()
        holder = socket.socket(family, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Exists(
                f"cannot listen on {host}:{port}, somebody listens there: choose another --listen or stop what uses it"
            ) from None
        raise Invalid(f"cannot listen on {host}:{port} ({error.strerror or error}): choose another --listen") from None
    shown = f"[{host}]" if ":" in host else host
    return holder, msgspec.structs.replace(settings, listen=f"{shown}:{holder.getsockname()[1]}")


class Child:
    """One process of the node, started again when it dies."""

    def __init__(
        self,
        name: str,
        command: list[str],
        settings: Settings,
        clock: Clock,
        given_fds: tuple[int, ...] = (),
        *,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        restarted: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self._restarted = restarted  # hears its name, and whether it had "ended" or "hung"
        self._news = b""
        self._socket: socket.socket | None = None
        self._stop_timeout_s = stop_timeout_s
        self.process: asyncio.subprocess.Process | None = None
        self.refused = False
        self.starts = 0
        self._command, self._given_fds = command, given_fds
        self._settings = settings
        self._clock = clock
        self._stopping = False
        self._hung = False

    async def run(self) -> None:
        """Keep it running until `stop`. Returns early only if its first start was refused."""
        delay_s = RESTART_MIN_S
        while not self._stopping:
            started_s = self._clock.monotonic_s()
            status = await self._live()
            if self._stopping:
                return
            if status == EXIT_REFUSED and self.starts == 1:
                self.refused = True
                return
            if self._clock.monotonic_s() - started_s >= STEADY_S:
                delay_s = RESTART_MIN_S
            log.warning("%s ended with status %d; starting it again in %.1f s", self.name, status, delay_s)
            await asyncio.sleep(delay_s)
            self._restarted(self.name, "hung" if self._hung else "ended")
            delay_s = min(delay_s * 2, RESTART_MAX_S)

    async def _live(self) -> int:
        self.starts += 1
        self._hung = False
        self._socket, theirs = socket.socketpair()
        with self._socket:
            self._socket.setblocking(False)
            self._socket.send(self._settings.to_json() + b"\n" + self._news)
            with theirs:
                # The child begins so, and takes them later. (A terminal's Ctrl-C goes to all processes at once.)
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP, signal.SIGINT])
                try:
                    process = await asyncio.create_subprocess_exec(
                        *self._command, stdin=theirs.fileno(), env=_environment(), pass_fds=self._given_fds
                    )
                except OSError as error:
                    log.error("%s cannot be started: %s", self.name, error)
                    return 1
                finally:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP, signal.SIGINT])
            self.process = process
            watching = asyncio.create_task(self._watch(self._socket, process))
            try:
                return await process.wait()
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, beats: socket.socket, process: asyncio.subprocess.Process) -> None:
        """Kill it when it hangs."""
        pulse, count = Pulse(self._settings.hung_after_s), 0
        while not self._hung:
            await asyncio.sleep(interval_s(pulse.deadline_s))
            with suppress(OSError):
                count += len(beats.recv(65536))
            if pulse.look(self._clock.monotonic_s(), count, machine.active_s(process.pid)) and not self._stopping:
                log.error("%s hangs: it gave no sign of life for %g s; killing it", self.name, pulse.deadline_s)
                self._hung = True
                process.kill()

    def tell(self, line: bytes) -> None:
        """Send it a line now, and to whoever is started in its place."""
        self._news = line
        if self._socket is not None:
            with suppress(OSError):  # it has ended, or it hangs
                self._socket.send(line)

    def hang_up(self) -> None:
        """Have it reopen its log and read files anew."""
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGHUP)

    async def stop(self) -> None:
        """Ask it to end, and kill it if it does not in time."""
        self._stopping = True
        process = self.process
        if process is None or process.returncode is not None:
            return
        try:
            process.terminate()
            async with asyncio.timeout(self._stop_timeout_s):
                await process.wait()
        except ProcessLookupError:
            pass
        except TimeoutError:
            log.error("%s did not end within %.0f s: killing it", self.name, self._stop_timeout_s)
            process.kill()
            await process.wait()


def _environment() -> dict[str, str]:
    """The children's environment: ours, without Python's own knobs that would change what runs, and without what the
    service manager wants of us."""
    not_theirs = ("PYTHONOPTIMIZE", "PYTHONINSPECT", *VARIABLES)
    return {name: value for name, value in os.environ.items() if name not in not_theirs}


class Supervisor:
    """See the module's header."""

    def __init__(
        self, settings: Settings, *, clock: Clock = system_clock, announce: Callable[[str], None], node_log: Log
    ) -> None:
        self._clock = clock
        self._node_log = node_log
        self._manager = ServiceManager(os.environ)
        self._is_ready = False
        self._announce = announce
        self._holder, self.settings = hold_port(settings)
        fronts = self.settings.fronts_resolved
        self.settings = msgspec.structs.replace(self.settings, fronts=fronts)
        python = [sys.executable, "-m"]
        patience_s = STOP_TIMEOUT_S + settings.flush_timeout_s
        self.restarts: Counter[tuple[str, str]] = Counter()  # by child and reason
        self.children = [
            Child(
                "engine",
                [*python, "forebay.node.process.engine"],
                self.settings,
                clock,
                stop_timeout_s=patience_s,
                restarted=self._restarted,
            )
        ]
        shared_fd = make_shared()
        for number in range(fronts):
            command = [*python, "forebay.node.process.front", str(number), str(shared_fd)]
            front = Child(f"front {number}", command, self.settings, clock, (shared_fd,), restarted=self._restarted)
            self.children.append(front)

    async def run(self, stopping: asyncio.Event) -> int:
        """Run the node until `stopping` is set; the exit status."""
        self.settings.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for stale in (self.settings.node_file, self.settings.no_flush_file, self.settings.owed_file):
            stale.unlink(missing_ok=True)
        tasks = [asyncio.create_task(child.run()) for child in self.children]
        ready = asyncio.create_task(self._tell_when_ready())
        aside = [ready, asyncio.create_task(self._rotate_log()), asyncio.create_task(self._beat())]
        stopped = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
            refused = [child.name for child in self.children if child.refused]
            if refused:
                log.error("%s cannot start: see its message above", refused[0])
            return EXIT_REFUSED if refused else 0
        finally:
            self._is_ready = False
            self._manager.tell("STOPPING=1")
            for task in (*aside, stopped):
                task.cancel()
            self.settings.node_file.unlink(missing_ok=True)
            await asyncio.gather(*(child.stop() for child in self.children[1:]))
            await self.children[0].stop()  # after the fronts: what they are sending may still need it
            for task in tasks:
                task.cancel()
            await asyncio.gather(*aside, stopped, *tasks, return_exceptions=True)
            self.settings.no_flush_file.unlink(missing_ok=True)
            self._holder.close()

    def hang_up(self) -> None:
        """Have every process of the node reopen its log and read identities and certificates anew."""
        if self._is_ready:
            self._manager.tell("RELOADING=1", f"MONOTONIC_USEC={int(self._clock.monotonic_s() * 1e6)}")
        for child in self.children:
            child.hang_up()
        if self._is_ready:
            self._manager.tell("READY=1")

    async def _beat(self) -> None:
        """Tell the service manager that we live, if it wants to know."""
        while self._manager.watchdog_s:
            self._manager.tell("WATCHDOG=1")
            await asyncio.sleep(self._manager.watchdog_s)

    async def _rotate_log(self) -> None:
        while True:
            self._node_log.rotate(self.settings.log_bytes_max)
            await asyncio.sleep(LOG_LOOK_S)

    def _restarted(self, name: str, reason: str) -> None:
        self.restarts[name.replace(" ", "-"), reason] += 1
        self.children[0].tell(json.dumps([[*which, count] for which, count in self.restarts.items()]).encode() + b"\n")

    async def _tell_when_ready(self) -> None:
        """Write node.json and announce the endpoint once a client would be served."""
        family, address = self._holder.family, self._holder.getsockname()
        loop = asyncio.get_running_loop()
        wanted = max(1, self.settings.fronts_resolved)
        while True:
            try:
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    probe.setblocking(False)
                    await loop.sock_connect(probe, address)
                    if _listeners(address[1], family) >= wanted:
                        break
            except OSError:
                pass
            await asyncio.sleep(READY_POLL_S)
        told = {"pid": os.getpid(), "endpoint": self.settings.endpoint, "version": forebay.__version__}
        temporary = self.settings.node_file.with_suffix(".new")
        temporary.write_text(json.dumps(told))
        temporary.replace(self.settings.node_file)
        try:
            remember(self.settings)
        except OSError as error:
            log.warning("who may get in is not remembered for the next start: %s", error)
        self._announce(self.settings.endpoint)
        self._is_ready = True
        self._manager.tell("READY=1", f"STATUS=serving at {self.settings.endpoint}")


def _listeners(port: int, family: int) -> int:
    """How many sockets listen on `port`, by the kernel's table."""
    with open("/proc/net/tcp6" if family == socket.AF_INET6 else "/proc/net/tcp") as table:
        rows = [row.split(None, 4) for row in table]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


async def supervise(settings: Settings, announce: Callable[[str], None], node_log: Log) -> int:
    """Run a node until SIGTERM or SIGINT; the exit status."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    running: list[Supervisor] = []

    def hang_up() -> None:
        node_log.reopen()
        log.info("SIGHUP: logs are opened again, identities and certificates read again")
        for each in running:
            each.hang_up()

    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    lock = Lock(settings.lock_file)
    try:
        check_not_looser(settings)
    except BaseException:
        lock.release()
        raise
    stopped = asyncio.create_task(stopping.wait())
    waiting = asyncio.create_task(last_run_ended(settings, system_clock))
    try:
        await asyncio.wait([stopped, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            return 0
        await waiting
        running.append(Supervisor(settings, announce=announce, node_log=node_log))
        return await running[0].run(stopping)
    finally:
        for task in (stopped, waiting):
            task.cancel()
        await asyncio.gather(stopped, waiting, return_exceptions=True)
        lock.release()
