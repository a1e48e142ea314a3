"""The box: many hosts on one machine, each in a network namespace, joined by a switch over links of chosen rates.

    with Box() as box:
        one, two = box.host("one", up_bit_s=400e6), box.host("two")
        box.start(one.place(Nginx(root)))       # a server of `bench/servers.py`, reached at one.address
        two.run(["curl", …])                    # any command, as on that host
        one.cut(two)                            # what `one` sends to `two` is lost; the other way still works

    python -m bench.cluster --nodes 3           # nodes, etcd and a bucket in a box, to play with

Theory. What depends on the network between machines (placement, take-over, who shares which link) cannot be seen on
loopback. Here every host has a network stack of its own and one veth into a bridge, which has a namespace of its own
too, so that no firewall rule of this machine touches it. `tbf` gives a link its rate each way. The rate counts headers,
so frames are as large as in a data centre (MTU 9000: 1 % is headers). This machine is one more host of the box, the
*operator*, over a link of its own.

*Cuts.* A host sends to its own hardware address instead of the other's: the switch never sends a frame back where it
came from, so it is lost without a word, one way only, for connections that exist too.

*Nothing stays.* Leaving the block kills what runs in the box and removes it. If the harness itself is killed, the
kernel kills the servers that it started, and the next box removes the rest: everything has the box's number in its
name, and a number that nobody holds (a socket that the kernel closes with its process) is free. So two boxes at once
have different numbers, and so different names and addresses.

Rejected: netem for delay and loss (many kernels lack it); iptables for cuts (rules outlive what they were for);
containers (a daemon, images, and the same namespaces beneath).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from bench.servers import Server, ServerFailed, find_program

NETWORK = "198.18"  # of RFC 2544, for measuring networks: NETWORK.<box>.<host>
BOXES_MAX, HOSTS_MAX = 256, 250
MTU_BYTES = 9000
BURST_BYTES_MIN = 128 << 10  # more than one write of the kernel (64 KiB), which `tbf` would have to cut
QUEUE_S = 0.05  # of a link: what comes when that much waits is lost
GONE_TIMEOUT_S = 30.0
NAMESPACES = Path("/run/netns")

S = TypeVar("S", bound=Server)


class NoBox(ServerFailed):
    """A box cannot be made on this machine, or not any more. The message says what to do."""


class Host:
    """One machine of a box. `address` is where its servers serve."""

    def __init__(self, box: Box, name: str, index: int) -> None:
        self.box, self.name = box, name
        self.namespace = box.namespace(name)
        self.address = f"{NETWORK}.{box.number}.{index}"
        self.hardware = f"02:fb:00:00:{box.number:02x}:{index:02x}"
        self.servers: list[Server] = []

    @property
    def within(self) -> tuple[str, ...]:
        """What stands in front of a command that runs on this host. It is the same process."""
        return find_program("nsenter"), f"--net={NAMESPACES / self.namespace}", "--"

    def place(self, server: S) -> S:
        """The server, on this host when it is started."""
        server.host, server.within, server.parent = self.address, self.within, self.box.dir
        self.servers.append(server)
        return server

    def run(self, command: Sequence[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """What a command says on this host."""
        whole = [*self.within, *command]
        return subprocess.run(whole, capture_output=True, text=True, timeout=timeout_s, check=False)

    # --- its link ----------------------------------------------------------------------------------------------------
    def shape(self, *, up_bit_s: float = 0, down_bit_s: float = 0) -> None:
        """What the link carries from the host and to it; 0 is what the machine can."""
        for namespace, link, rate in (
            (self.namespace, "eth0", up_bit_s),
            (self.box.namespace("switch"), self.name, down_bit_s),
        ):
            with contextlib.suppress(NoBox):  # there is none yet
                _do("tc", "-n", namespace, "qdisc", "del", "dev", link, "root")
            if rate:
                burst = max(BURST_BYTES_MIN, int(rate / 8 / 250))  # a timer fires 250 times a second or more
                shape = ("rate", f"{rate:.0f}bit", "burst", str(burst), "latency", f"{QUEUE_S * 1000:.0f}ms")
                _do("tc", "-n", namespace, "qdisc", "add", "dev", link, "root", "tbf", *shape)

    def cut(self, *others: Host) -> None:
        """From now on nothing that this host sends reaches the others. What they send comes."""
        for other in others:
            neighbour = (other.address, "lladdr", self.hardware, "dev", "eth0", "nud", "permanent")
            _do("ip", "-n", self.namespace, "neigh", "replace", *neighbour)

    def mend(self, *others: Host) -> None:
        """Undo `cut`."""
        for other in others:
            with contextlib.suppress(NoBox):  # it was not cut
                _do("ip", "-n", self.namespace, "neigh", "del", other.address, "dev", "eth0")

    def unplug(self) -> None:
        """Nothing comes or goes, and the host knows."""
        _do("ip", "-n", self.box.namespace("switch"), "link", "set", self.name, "down")

    def plug(self) -> None:
        """Undo `unplug`."""
        _do("ip", "-n", self.box.namespace("switch"), "link", "set", self.name, "up")

    def carried(self) -> tuple[int, int]:
        """Bytes that the host has sent and received, headers included."""
        said = json.loads(_do("ip", "-n", self.namespace, "-s", "-j", "link", "show", "dev", "eth0"))
        return said[0]["stats64"]["tx"]["bytes"], said[0]["stats64"]["rx"]["bytes"]

    # --- what runs on it ---------------------------------------------------------------------------------------------
    def pause(self) -> None:
        """Stop the clock of everything that runs on it, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End everything that runs on it at once, as a crash of the machine does; disks stay. `restart` is its boot."""
        for server in self.servers:
            if server.running:
                server.kill()
        _kill_all(self.namespace)

    def restart(self) -> None:
        """Start the servers that were killed, in their directories; return when they are ready."""
        self.box.start(*(server for server in self.servers if not server.running))

    def _signal(self, number: signal.Signals) -> None:
        for pid in _pids(self.namespace):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Box:
    """See the module. A context manager; `NoBox` says why there can be none here."""

    def __init__(self) -> None:
        self.number = -1
        self.dir = Path()
        self.hosts: dict[str, Host] = {}
        self._claim: socket.socket | None = None

    def __enter__(self) -> Self:
        if os.geteuid():
            raise NoBox("a box of network namespaces needs root: run this as root, as with sudo")
        for program in ("ip", "tc"):
            find_program(program)
        self._claim, self.number = _claim_any()
        try:
            self.dir = Path(tempfile.mkdtemp(prefix=f"{self.namespace('')}"))
            self._make_switch()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill all that runs in it, and remove it. May be called twice."""
        if self._claim is None:
            return
        for host in self.hosts.values():
            host.kill()
            for server in host.servers:
                server.stop()  # its directory
        _sweep(self.number)
        self._claim.close()
        self._claim = None

    def namespace(self, name: str) -> str:
        """How this machine calls the network of the box's host `name`."""
        return _namespace(self.number, name)

    def host(self, name: str, *, up_bit_s: float = 0, down_bit_s: float = 0) -> Host:
        """One more host, with a name of at most 15 letters. For the rates see `Host.shape`."""
        assert name not in (*self.hosts, "switch", "operator"), name
        assert len(self.hosts) < HOSTS_MAX
        host = self.hosts[name] = Host(self, name, len(self.hosts) + 2)
        _do("ip", "netns", "add", host.namespace)
        ends = ("address", host.hardware, "mtu", str(MTU_BYTES), "netns", host.namespace)
        switch = self.namespace("switch")
        _do("ip", "-n", switch, "link", "add", name, "mtu", str(MTU_BYTES), "type", "veth", "peer", "eth0", *ends)
        _batch(host.namespace, "link set lo up", f"addr add {host.address}/24 dev eth0", "link set eth0 up")
        _batch(switch, f"link set {name} master switch", f"link set {name} up")
        host.shape(up_bit_s=up_bit_s, down_bit_s=down_bit_s)
        return host

    def start(self, *servers: Server) -> None:
        """Start servers that were placed, all at once; return when all are ready. Those that ran before keep their
        directories."""
        for server in servers:
            if server.dir == Path():
                server.settle()
            server.restart(wait=False)
        for server in servers:
            server.wait_ready()

    def _make_switch(self) -> None:
        switch, operator = self.namespace("switch"), _operator(self.number)
        _do("ip", "netns", "add", switch)
        _batch(switch, "link add switch type bridge", "link set switch up")
        _do("ip", "link", "add", operator, "mtu", str(MTU_BYTES), "type", "veth", "peer", "operator", "netns", switch)
        _batch(switch, f"link set operator mtu {MTU_BYTES} master switch", "link set operator up")
        _do("ip", "addr", "add", f"{NETWORK}.{self.number}.1/24", "dev", operator)
        _do("ip", "link", "set", operator, "up")


# --- names, and what others left -------------------------------------------------------------------------------------
def _namespace(number: int, name: str) -> str:
    return f"forebay-box-{number}-{name}"


def _operator(number: int) -> str:
    return f"fbbox{number}"


def _claim_any() -> tuple[socket.socket, int]:
    """Hold a number that nobody holds, after removing what is left of it and of others that nobody holds."""
    mine: tuple[socket.socket, int] | None = None
    left = {int(path.name.split("-")[2]) for path in NAMESPACES.glob("forebay-box-*-*")}
    for number in range(BOXES_MAX):
        if mine is not None and number not in left:
            continue
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0{_namespace(number, 'claim')}")
        except OSError:
            claim.close()
            continue
        _sweep(number)
        if mine is None:
            mine = claim, number
        else:
            claim.close()
    if mine is None:
        raise NoBox(f"{BOXES_MAX} boxes run on this machine: stop one")
    return mine


def _sweep(number: int) -> None:
    """Remove all of a box whose number is held here."""
    for path in NAMESPACES.glob(_namespace(number, "*")):
        _kill_all(path.name)
        _do("ip", "netns", "del", path.name)
    with contextlib.suppress(NoBox):  # it goes with the namespace of its other end, sooner or later
        _do("ip", "link", "del", _operator(number))
    for folder in Path(tempfile.gettempdir()).glob(_namespace(number, "*")):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            if (place := line.split()[1]).startswith(f"{folder}/"):  # a disk of a host whose owner was killed
                _do("umount", "--lazy", place)
        shutil.rmtree(folder, ignore_errors=True)


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _do("ip", "netns", "pids", namespace).split()]


def _kill_all(namespace: str) -> None:
    """Kill what runs there, and wait until it is gone."""
    deadline_s = time.monotonic() + GONE_TIMEOUT_S
    while pids := [pid for pid in _pids(namespace) if not _is_zombie(pid)]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            raise NoBox(f"processes {pids} of {namespace} do not end: look at them with ps")
        time.sleep(0.01)


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def _batch(namespace: str, *lines: str) -> None:
    _do("ip", "-n", namespace, "-batch", "-", stdin="\n".join(lines) + "\n")


def _do(program: str, *arguments: str, stdin: str = "") -> str:
    """What the program prints. `NoBox` with what it says if it fails."""
    command = [find_program(program), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoBox(
            f"`{' '.join([program, *arguments])}` failed ({done.stderr.strip()}): a box needs root and a kernel "
            "with network namespaces, bridges and tbf"
        )
    return done.stdout


@contextlib.contextmanager
def cut_off(host: Host, *others: Host) -> Iterator[None]:
    """Neither way anything between `host` and the others, for the length of a `with` block."""
    host.cut(*others)
    for other in others:
        other.cut(host)
    try:
        yield
    finally:
        host.mend(*others)
        for other in others:
            other.mend(host)
