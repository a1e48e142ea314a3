"""A cluster of Forebay nodes in a box: three members of etcd, a bucket, and nodes, each on a host of its own.

    python -m bench.cluster --nodes 3 [--mbit 400]      # as root: to play with, `help` says how

    with Box() as box:
        cluster = Cluster(box, 3, up_bit_s=400e6)
        cluster.add_bucket("corpus")
        cluster.hosts[0].kill()                         # cut, pause, unplug, …: see `bench/box.py`

Theory. Nodes are started as an operator starts them, with identities and a key by which they know each other, since
they listen beyond loopback. `TOKEN` and `KEY_ID` of `bench/parts.py` may do anything. The box's link rates bind what
nodes *send*: that is what a cluster is asked for, and filling it is not slowed.
"""

from __future__ import annotations

import argparse
import cmd
import contextlib
import http.client
import itertools
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from bench.box import Box, Host
from bench.load import LoadFailed
from bench.parts import BUCKET, Node, upload_file
from bench.servers import EtcdCluster, SeaweedFS, Server, ServerFailed, find_program
from forebay.client.sync import Client
from forebay.core.errors import ForebayError
from forebay.core.messages.node_state import ClusterState
from forebay.core.placement import Members
from forebay.core.types import FRESH_IMMUTABLE, Bucket, WriteMode

AGREED_TIMEOUT_S = 60.0
LEASE_S = 10.0


class Cluster:
    """See the module. `hosts[n]` is where `nodes[n]` runs; closing the box ends it all."""

    def __init__(
        self,
        box: Box,
        count: int,
        *,
        up_bit_s: float = 0,
        lease_s: float = LEASE_S,
        fronts: int = 1,
        environment: Mapping[str, str] | None = None,
        takes_over: bool = False,
        capacity_bytes: int = 64 << 30,
        settings: str = "",
        volumes: Callable[[str], Sequence[Path]] = lambda host: (),
    ) -> None:
        """`environment`: variables of the nodes beside this process's own. `takes_over`: others act for a node that is
        silent, if all buckets have two copies. `capacity_bytes` is each node's. `settings`: more lines of its file;
        `volumes` makes the disks of a host."""
        self.box, self._up_bit_s, self._fronts = box, up_bit_s, fronts
        self._capacity_bytes = capacity_bytes
        self._environment = ("env", *(f"{name}={value}" for name, value in (environment or {}).items()))
        self._made = 0
        self.hosts: list[Host] = []
        self.nodes: list[Node] = []
        self.etcd = EtcdCluster(3)
        for number, member in enumerate(self.etcd.members, 1):
            box.host(f"etcd{number}").place(member)
            member.settle()  # each is told of all
        self.bucket = box.host("bucket").place(SeaweedFS())
        self.peer_key = box.dir / "peer.key"
        self.peer_key.write_text("a key that all nodes of this box have, and nobody else")
        self.peer_key.chmod(0o600)
        self._config = box.dir / "node.toml"
        self._config.write_text(f"lease = {lease_s}\ntake_over = {'true' if takes_over else 'false'}\n{settings}")
        self._volumes = volumes
        box.start(*self.etcd.members, self.bucket)
        self.bucket.create_bucket(BUCKET)
        self.grow(count)

    def grow(self, count: int) -> None:
        """Start so many nodes more; return when all agree that all are active."""
        self.start(count)
        self.wait_agreed()

    def start(self, count: int) -> None:
        """Start so many nodes more; return when each answers."""
        etcd = ",".join(f"{host}:{port}" for host, port in self.etcd.addresses)
        options = ("--cluster", f"etcd://{etcd}/box", "--peer-key", str(self.peer_key), "--config", str(self._config))
        for _ in range(count):
            self._made += 1
            host = self.box.host(f"node{self._made}", up_bit_s=self._up_bit_s)
            self.hosts.append(host)
            disks = [word for path in self._volumes(host.name) for word in ("--volume", str(path))]
            node = Node(
                fronts=self._fronts, capacity_bytes=self._capacity_bytes, signed=True, options=(*options, *disks)
            )
            self.nodes.append(host.place(node))
            node.within += self._environment
        self.box.start(*self.nodes[len(self.nodes) - count :])

    def remove(self, node: Node) -> None:
        """End a node's machine, disks too, as whoever drained it does."""
        number = self.nodes.index(node)
        self.hosts[number].kill()
        node.stop()
        del self.nodes[number], self.hosts[number]

    def wait_agreed(self, nodes: Iterable[Node] = ()) -> None:
        """Return when these nodes (by default all) say that they, and no others, are active, by one active map."""
        wait_agreed(list(nodes) or self.nodes)

    def add_bucket(self, name: str, write: WriteMode = "through", *, copies: int = 1) -> None:
        """The box's bucket under `name`, at every node."""
        for node in self.nodes:
            with node.client() as client:
                options = self.bucket.options()
                bucket = Bucket(name, f"s3://{BUCKET}", FRESH_IMMUTABLE, options=options, write=write, copies=copies)
                client.bucket_put(bucket)

    def balanced(self, name: str, count: int) -> list[list[str]]:
        """The first `count` of the keys `name/0…` for each node that owns them: as even as the shares of 10^5 keys."""
        with self.nodes[0].client() as client:
            nodes = client.node_map().nodes
        members = Members({node.node_id: node.weight for node in nodes})
        at = {node.node_id: [one.endpoint for one in self.nodes].index(node.endpoint) for node in nodes}
        found: list[list[str]] = [[] for _ in self.nodes]
        number = 0
        while any(len(keys) < count for keys in found):
            key = f"{name}/{number:05d}"
            own = found[at[members.first(BUCKET, key)]]
            if len(own) < count:
                own.append(key)
            number += 1
        return found

    def on_two_nodes(self, bucket: str, node: Node, count: int) -> tuple[list[str], list[str]]:
        """So many keys of which a node is the home or has the second copy, and so many of which it is neither."""
        with self.nodes[0].client() as client:
            nodes = client.node_map().nodes
        members = Members({each.node_id: each.weight for each in nodes})
        its = next(each.node_id for each in nodes if each.endpoint == node.endpoint)
        found: tuple[list[str], list[str]] = [], []
        for key in map("{:05d}".format, itertools.count()):
            own = found[its not in members.order(bucket, key)[:2]]
            if len(own) < count:
                own.append(key)
            if min(map(len, found)) == count:
                return found
        raise AssertionError("there are keys without end")

    def wait_covered(self) -> None:
        """Return when every node says of every other that all it should has its second copy."""
        _wait(self.nodes, _are_covered, "have not all on two nodes")

    def warm(self, number: int, keys: Sequence[str]) -> None:
        """Return when a node has all of these."""
        with self.nodes[number].client() as client:
            job = client.start_job("prefetch", BUCKET, keys=tuple(keys))
            while job.state == "running":
                time.sleep(0.05)
                job = client.job(job.job)
        if job.state != "done" or job.units_failed:
            raise LoadFailed(f"prefetch ended {job.state}: {'; '.join(job.errors)}")

    def upload(self, key: str, path: Path) -> None:
        """Put a file into the box's bucket, past the nodes."""
        upload_file(self.bucket, key, path)


def wait_agreed(nodes: list[Node]) -> None:
    """Return when these nodes say that they, and no others, are active, by one active map."""
    _wait(nodes, _agree, "do not agree")


def _wait(nodes: list[Node], holds: Callable[[list[ClusterState]], bool], what: str) -> None:
    """Return when that holds of what the nodes say of their cluster."""
    deadline_s = time.monotonic() + AGREED_TIMEOUT_S
    while not ((said := _said(nodes)) and holds(said)):
        if time.monotonic() > deadline_s:
            raise ServerFailed(f"{len(nodes)} nodes {what}; the first says: {nodes[0].log_tail()}")
        time.sleep(0.1)


def _said(nodes: list[Node]) -> list[ClusterState]:
    """What each says; empty if one says nothing."""
    said = []
    for node in nodes:
        try:
            with node.client() as client:
                state = client.status().cluster
        except ForebayError:
            return []
        if state is None:
            return []
        said.append(state)
    return said


def _agree(said: list[ClusterState]) -> bool:
    active = all(state.active and sum(one.state == "active" for one in state.nodes) == len(said) for state in said)
    return active and len({state.epoch for state in said}) == 1


def _are_covered(said: list[ClusterState]) -> bool:
    return not any(node.kept_once for state in said for node in state.nodes)


class WeedPart(Server):
    """One server of a distributed SeaweedFS: `command` and flags by `{own}`, `{grpc}` and `{dir}`."""

    name = "seaweedfs"
    ports_wanted = 2
    stop_signals = (signal.SIGKILL,)

    def __init__(self, verb: str, *flags: str) -> None:
        super().__init__()
        self._verb, self._flags = verb, flags

    @property
    def address(self) -> str:
        """As the others name it: HOST:PORT.GRPCPORT."""
        return f"{self.host}:{self.ports[0]}.{self.ports[1]}"

    def command(self) -> list[str]:
        place = ["-ip.bind=" + self.host, f"-port={self.ports[0]}", f"-port.grpc={self.ports[1]}"]
        named = [] if self._verb == "s3" else ["-ip=" + self.host]
        flags = [flag.replace("{dir}", str(self.dir)) for flag in self._flags]
        return [find_program("weed"), f"-logdir={self.dir}", "-v=0", self._verb, *named, *place, *flags]

    def is_ready(self) -> bool:
        with socket.create_connection((self.host, self.ports[0]), timeout=5):
            return True


class WeedCluster:
    """SeaweedFS on `count` hosts with links as nodes have them: a volume server and an S3 gateway on each. Master and
    filer are on a host of their own, which no link slows."""

    def __init__(self, box: Box, count: int, *, up_bit_s: float = 0) -> None:
        centre = box.host("weed")
        master = centre.place(
            WeedPart("master", "-mdir={dir}", "-volumeSizeLimitMB=1024", "-telemetry=false", "-electionTimeout=1s")
        )
        box.start(master)
        filer = centre.place(
            WeedPart("filer", f"-master={master.address}", "-defaultStoreDir={dir}", "-localSocket={dir}/f")
        )
        self.hosts = [box.host(f"weed{number + 1}", up_bit_s=up_bit_s) for number in range(count)]
        volumes = [
            host.place(WeedPart("volume", f"-master={master.address}", "-dir={dir}", "-max=100", "-minFreeSpace=1"))
            for host in self.hosts
        ]
        box.start(filer, *volumes)
        off = ("-port.iceberg=0", "-port.lance=0", "-localSocket={dir}/s")
        self.gateways = [host.place(WeedPart("s3", f"-filer={filer.address}", *off)) for host in self.hosts]
        box.start(*self.gateways)
        connection = http.client.HTTPConnection(self.gateways[0].host, self.gateways[0].ports[0], timeout=60)
        with contextlib.closing(connection):
            connection.request("PUT", f"/{BUCKET}")
            if connection.getresponse().status != 200:
                raise ServerFailed("SeaweedFS made no bucket")

    @property
    def endpoints(self) -> list[str]:
        """Of the gateways."""
        return [f"http://{gateway.host}:{gateway.ports[0]}" for gateway in self.gateways]


class Shell(cmd.Cmd):
    """What one types to a box."""

    prompt = "box> "

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.cluster = cluster
        self.intro = (
            "Nodes, each as `export FOREBAY_URL=…`, with FOREBAY_TOKEN=bench-token:\n"
            + "".join(
                f"  {node.endpoint}  {host.name}\n" for host, node in zip(cluster.hosts, cluster.nodes, strict=True)
            )
            + f"The bucket {BUCKET} (s3://{BUCKET} at {cluster.bucket.endpoint}) is added at each.\n"
            "help lists what you can do to hosts; quit removes everything."
        )

    def onecmd(self, line: str) -> bool:
        try:
            return bool(super().onecmd(line))
        except (KeyError, TypeError, ValueError) as error:
            print(f"not understood ({error}): help says how")
        except (ServerFailed, OSError) as error:
            print(error)
        return False

    def emptyline(self) -> bool:
        return False

    def _hosts(self, line: str) -> list[Host]:
        names = line.split()
        if not names:
            raise ValueError(f"name a host: {', '.join(self.cluster.box.hosts)}")
        return [self.cluster.box.hosts[name] for name in names]

    def do_cut(self, line: str) -> None:
        """cut A B…: what A sends to B is lost, one way"""
        first, *others = self._hosts(line)
        first.cut(*others)

    def do_mend(self, line: str) -> None:
        """mend A B…: undo cut"""
        first, *others = self._hosts(line)
        first.mend(*others)

    def do_unplug(self, line: str) -> None:
        """unplug A…: nothing comes or goes"""
        for host in self._hosts(line):
            host.unplug()

    def do_plug(self, line: str) -> None:
        """plug A…: undo unplug"""
        for host in self._hosts(line):
            host.plug()

    def do_pause(self, line: str) -> None:
        """pause A…: stop all that runs there, until resume"""
        for host in self._hosts(line):
            host.pause()

    def do_resume(self, line: str) -> None:
        """resume A…: undo pause"""
        for host in self._hosts(line):
            host.resume()

    def do_kill(self, line: str) -> None:
        """kill A…: as if the machine crashed; its disks stay"""
        for host in self._hosts(line):
            host.kill()

    def do_restart(self, line: str) -> None:
        """restart A…: start what was killed"""
        for host in self._hosts(line):
            host.restart()

    def do_shape(self, line: str) -> None:
        """shape A MBIT: what its link carries each way; 0 is no limit"""
        name, mbit = line.split()
        rate = float(mbit) * 1e6
        self.cluster.box.hosts[name].shape(up_bit_s=rate, down_bit_s=rate)

    def do_grow(self, line: str) -> None:
        """grow [N]: so many nodes more"""
        self.cluster.grow(int(line or 1))
        self.cluster.add_bucket(BUCKET)

    def do_run(self, line: str) -> None:
        """run A COMMAND…: run it on that host"""
        name, *command = shlex.split(line)
        done = self.cluster.box.hosts[name].run(command)
        print(done.stdout + done.stderr, end="")

    def do_status(self, line: str) -> None:
        """status [A]: the cluster as a node knows it"""
        host = self.cluster.box.hosts[line or self.cluster.hosts[0].name]
        node = self.cluster.nodes[self.cluster.hosts.index(host)]
        with node.client() as client:
            _print_state(client)

    def do_quit(self, _line: str) -> bool:
        """quit: end and remove everything"""
        return True

    do_EOF = do_quit


def _print_state(client: Client) -> None:
    try:
        state = client.status().cluster
    except ForebayError as error:
        print(error)
        return
    assert state is not None
    print(f"map {state.epoch}, {'active' if state.active else 'preparing'} {state.trouble}")
    for node in state.nodes:
        print(f"  {node.node_id}  {node.address:22} {node.state:12} {node.share:6.1%}  {node.doing}")


def main(arguments: list[str]) -> int:
    """Make a box with a cluster, and do what is typed."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description="A cluster in a box. Needs root.")
    parser.add_argument("--nodes", type=int, default=3, help="how many nodes (default: 3)")
    parser.add_argument(
        "--mbit", type=float, default=0, help="what each node's link carries from it (default: no limit)"
    )
    parser.add_argument("--lease", type=float, default=LEASE_S, help=f"seconds of the lease (default: {LEASE_S:g})")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        with Box() as box:
            cluster = Cluster(box, given.nodes, up_bit_s=given.mbit * 1e6, lease_s=given.lease)
            cluster.add_bucket(BUCKET)
            Shell(cluster).cmdloop()
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
