"""A cluster in a box for a storm: its nodes, how clients and the judge reach them, and what goes wrong around them.

Theory. Three members of etcd, a bucket service behind a gate (`careful.py`) and nodes run on hosts of their own
(`bench/cluster.py`). Clients ask any node that the cluster has, chosen anew for each call, as S3 clients that know
nothing of homes. A node that refuses the connection did nothing, so the next one is asked.

*Faults.* Each is a context manager: it strikes, lasts while the clients work, and has passed at its end. What a home
has that no other node has is unavailable while it is away, and 503 says so; no answer may be wrong. With `takes_over`
buckets have two copies, or three, and the cluster promises more: every key is served while one node is dead, and a
machine that was killed stays so until then. As many machines as there are copies less one may be lost for good.

*Quiet.* What a cut link held back arrives when it is mended. `is_settled` waits for that too: nothing may be on its way
in any host of the box, or a write that a client gave up would happen after its history was judged.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from bench.box import Box, Host, cut_off
from bench.cluster import Cluster
from bench.parts import KEY_ID, SECRET, Node
from bench.servers import SeaweedFS, Server
from forebay.core.errors import ForebayError
from forebay.core.messages.node_state import NodeState
from forebay.core.types import FRESH_IMMUTABLE, LOCAL_URL, Bucket, WriteMode
from forebay.sim.clients import Answer
from tests.patience import PATIENCE_S, until
from tests.storm import slicing
from tests.storm.judging import Ask
from tests.storm.slicing import Slicing
from tests.storm.weather import fail_now, mount_disk

LEASE_S = 4.0
NODES_MIN, NODES_MAX = 3, 5
LOOKED_AT = 24  # keys that show whether all is served: one of each node's, whoever is in its place, is among them
CALL_TIMEOUT_S = 15.0
LEAVES_WITHIN_S = 6.0  # a node that is drained and has local data once stays: nobody waits longer to see that
PLANTED_PATIENCE_S = 30.0  # until all is whole where a fault keeps it from being; without one it takes a second
LOST_AFTER_S = 2.0  # a disk that failed is not waited for any longer
DISK_BYTES = 256 << 20
MODES: dict[str, WriteMode] = {"back": "back", "local": "local", "coded": "back"}
REPOSITORY = Path(__file__).resolve().parents[2]
PREPARING = """
from tests.storm.cluster_plants import plant_as_told
from tests.storm.paces import quicken

plant_as_told()
quicken()
"""


class Gate(Server):
    """`careful.py` before the bucket service, on the same host."""

    name = "gate"

    def __init__(self, behind: SeaweedFS) -> None:
        super().__init__()
        self.behind = behind

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.ports[0]}"

    def command(self) -> list[str]:
        script = Path(__file__).with_name("careful.py")
        return [sys.executable, "-S", str(script), self.host, str(self.ports[0]), str(self.behind.port)]

    def is_ready(self) -> bool:
        with socket.create_connection((self.host, self.ports[0]), timeout=PATIENCE_S):
            return True


class Fleet:
    """See the module. `plant` names a fault of `cluster_plants.py` that every node shall have."""

    def __init__(self, box: Box, kinds: list[str], chance: random.Random, *, plant: str = "", takes_over: bool = False):
        self.box, self.kinds, self.takes_over = box, kinds, takes_over
        self._choice = random.Random(chance.random())
        self.copies = self._choice.choice([2, 3]) if takes_over else 1
        self.may_lose = min(self.copies - 1, 1 if "coded" in kinds else NODES_MAX)  # nodes at once, for good
        environment = {}
        if plant or "coded" in kinds:
            (box.dir / "sitecustomize.py").write_text(PREPARING)
            environment = {"PYTHONPATH": f"{box.dir}:{REPOSITORY / 'src'}:{REPOSITORY}", "FOREBAY_PLANT": plant}
        self._disks = contextlib.ExitStack()
        self._mounts: dict[str, list[Path]] = {}  # of each host
        self.disks: dict[str, list[Path]] = {}  # those that can fail
        self.cluster = Cluster(
            box,
            NODES_MIN,
            lease_s=LEASE_S,
            environment=environment,
            takes_over=takes_over,
            settings=f"volume_lost_after = {LOST_AFTER_S}\n",
            volumes=self._make_disks if takes_over else lambda host: (),
        )
        self.seaweed = self.cluster.bucket
        self.gate = box.hosts["bucket"].place(Gate(self.seaweed))
        box.start(self.gate)
        self.buckets = [f"storm-{kind}" for kind in kinds]
        self.backed = [f"storm-{kind}" for kind in kinds if kind == "back"]
        for bucket in self.backed:
            self.seaweed.create_bucket(bucket)
        for node in self.cluster.nodes:
            self.add_buckets(node)
        self.open_nodes = list(self.cluster.nodes)
        coded = [bucket for bucket, kind in zip(self.buckets, kinds, strict=True) if kind == "coded"]
        patience_s = PLANTED_PATIENCE_S if plant else PATIENCE_S
        self.slicing = Slicing(coded, lambda: list(self.open_nodes), asked, self.cluster.peer_key, patience_s)
        until(self.is_settled, "the cluster is settled")
        until(self.takes_writes, "every bucket is served")

    def add_buckets(self, node: Node) -> None:
        options = {**self.seaweed.options(), "endpoint": self.gate.endpoint}
        with node.client() as client:
            for name, kind in zip(self.buckets, self.kinds, strict=True):
                url = {"back": f"s3://{name}", "local": LOCAL_URL, "coded": slicing.URL}[kind]
                reach = options if kind == "back" else {}
                copies = 2 if kind == "coded" else self.copies
                bucket = Bucket(name, url, FRESH_IMMUTABLE, options=reach, write=MODES[kind], copies=copies)
                client.bucket_put(bucket)

    # --- disks -------------------------------------------------------------------------------------------------------
    def _make_disks(self, host: str) -> list[Path]:
        """Two disks of a host, of which one may fail: what nodes keep twice survives that."""
        found = self._mounts[host] = [self.box.dir / f"{host}-disk-{number}" for number in range(2)]
        self.disks[host] = list(found)
        for path in found:
            path.mkdir()
            if mount_disk(path, DISK_BYTES):
                self.disks[host] = []  # it is memory, which does not fail
            self._disks.callback(subprocess.run, ["umount", "--lazy", str(path)], check=False, capture_output=True)
        return found

    def replace_disk(self, path: Path) -> None:
        """An empty disk in its place, which the node takes at its next start."""
        subprocess.run(["umount", "--lazy", str(path)], check=True)
        mount_disk(path, DISK_BYTES)

    def remove(self, node: Node) -> None:
        """End its machine, and give its disks back."""
        host = self.cluster.hosts[self.cluster.nodes.index(node)]
        self.cluster.remove(node)
        for path in self._mounts.pop(host.name, []):
            subprocess.run(["umount", "--lazy", str(path)], check=True)
            path.with_suffix(".img").unlink(missing_ok=True)

    def close(self) -> None:
        """Give the disks back; the box ends all else."""
        self._disks.close()

    # --- what clients and the judge ask ------------------------------------------------------------------------------
    def ask(self, method: str, target: str, headers: dict[str, str], body: bytes | None) -> Answer:
        """As a client that knows all nodes."""
        nodes = list(self.open_nodes)
        for node in self._choice.sample(nodes, len(nodes)):
            with contextlib.suppress(ConnectionRefusedError):
                return asked(node.endpoint, method, target, headers, body)
        raise ConnectionRefusedError

    def everywhere(self) -> dict[str, Ask]:
        """How each node is asked."""

        def at(node: Node) -> Ask:
            return lambda method, target, headers, body: asked(node.endpoint, method, target, headers, body)

        return {node.host: at(node) for node in self.open_nodes}

    def takes_writes(self) -> bool:
        """Whether each node serves each bucket."""
        targets = [f"/{bucket}/settled-{number}" for bucket in self.buckets for number in range(LOOKED_AT)]
        try:
            return all(
                ask("HEAD", target, {}, None).status in (200, 404)
                for ask in self.everywhere().values()
                for target in targets
            )
        except (OSError, http.client.HTTPException):
            return False

    # --- quiet -------------------------------------------------------------------------------------------------------
    def states(self) -> list[NodeState]:
        """What each node says of itself; empty if one does not."""
        found = []
        for node in self.cluster.nodes:
            try:
                with node.client() as client:
                    found.append(client.status())
            except (ForebayError, OSError):
                return []
        return found

    def is_settled(self) -> bool:
        """Whether all nodes live, agree, do nothing for clients, and nothing is on its way to anybody."""
        states = self.states()
        epochs = {state.cluster.epoch for state in states if state.cluster is not None and state.cluster.active}
        here = {node.endpoint for node in self.cluster.nodes}
        return (
            len(states) == len(self.cluster.nodes)
            and len(epochs) == 1
            and all(state.cluster is not None and state.cluster.active for state in states)
            and all(
                node.state in ("active", "leaving") or node.address not in here
                for state in states
                for node in (state.cluster.nodes if state.cluster is not None else [])
            )
            and (not self.takes_over or self.is_covered(states))
            and not any(state.reads or state.flights or state.catching_up for state in states)
            and not self.on_its_way()
        )

    def is_covered(self, states: list[NodeState]) -> bool:
        """Whether all that no backend has is on two nodes, and no node has yet to forget what it had."""
        here = {node.endpoint for node in self.cluster.nodes}
        nodes = [node for state in states for node in (state.cluster.nodes if state.cluster is not None else [])]
        return all(node.doing == "serves its keys" for node in nodes if node.address in here and node.state == "active")

    def on_its_way(self) -> list[str]:
        """Connections with bytes that one end has not sent, or has not been told of."""
        found = []
        for host in self.box.hosts.values():
            for line in host.run(["ss", "-Htn"]).stdout.splitlines():
                state, received, unsent, *_ = line.split()
                end = state == "CLOSE-WAIT"  # of an idle connection: it counts as one byte
                if int(received) > end or unsent != "0":
                    found.append(f"{host.name}: {line}")
        return found

    def left_over(self) -> list[Path]:
        """Temporary files, and parts of uploads, on the nodes' disks."""
        disks = [Path(path) for node in self.cluster.nodes for path in volumes_of(node)]
        walked = [each for disk in disks for name in ("tmp", "parts") for each in os.walk(disk / name)]
        return [Path(at) / name for at, _, names in walked for name in names]

    # --- the backend -------------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """Return when no node owes anything."""
        for node in self.cluster.nodes:
            for bucket in self.backed:
                node.flush(bucket)
        until(
            lambda: (
                not any(
                    each.dirty_objects
                    for state in self.states() or []
                    for each in state.buckets
                    if each.name in self.backed
                )
            ),
            "nothing is owed",
        )

    def compare_backends(self, places: list[tuple[str, str]]) -> list[str]:
        """After a flush the bucket service holds what the nodes show, and nothing else."""
        wrong = [
            f"{state.endpoint}: {bucket.name} has {bucket.conflicts} conflicts"
            for state in self.states()
            for bucket in state.buckets
            if bucket.conflicts
        ]
        for bucket, key in places:
            if bucket not in self.backed:
                continue
            target = f"/{bucket}/{quote(key)}"
            shown = until(lambda target=target: (a := self.ask("GET", target, {}, None)).status in (200, 404) and a)
            behind = asked(self.seaweed.endpoint, "GET", target, {}, None)
            if (shown.status, shown.body if shown.status == 200 else b"") != (
                behind.status,
                behind.body if behind.status == 200 else b"",
            ):
                wrong.append(
                    f"{target}: nodes show {shown.status} {shown.body[:60]!r} ({len(shown.body)}), the bucket has "
                    f"{behind.status} {behind.body[:60]!r} ({len(behind.body)})"
                )
        return wrong

    # --- the nodes ---------------------------------------------------------------------------------------------------
    def join(self) -> None:
        """One node more, which clients are told of when it serves."""
        self.cluster.grow(1)
        node = self.cluster.nodes[-1]
        self.add_buckets(node)
        until(lambda: not any(refused(node, bucket) for bucket in self.buckets), "the new node serves every bucket")
        self.open_nodes = list(self.cluster.nodes)

    def state_of(self, node: Node) -> str:
        """Its state, as any node knows it; "" while nobody tells."""
        for state in self.states():
            for each in state.cluster.nodes if state.cluster is not None else []:
                if each.address == node.endpoint:
                    return each.state
        return ""

    def wish(self, node: Node, word: str) -> None:
        """Say so at another node, of which one may be dead; again until it is taken."""

        def is_taken() -> bool:
            for other in self.cluster.nodes:
                with contextlib.suppress(ForebayError), other.client() as client:
                    if other is not node:
                        client.wish(node.endpoint, word)  # type: ignore[arg-type]
                        return True
            return False

        until(is_taken, f"{node.host} is wanted {word}")

    def hosts_of(self, chance: random.Random, count: int) -> list[Host]:
        return chance.sample(self.cluster.hosts, count)


def refused(node: Node, bucket: str) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return asked(node.endpoint, "HEAD", f"/{bucket}/nothing", {}, None).status != 404
    return True


_CREDENTIALS = Credentials(KEY_ID, SECRET)


def asked(
    endpoint: str,
    method: str,
    target: str,
    headers: dict[str, str],
    body: bytes | None,
    credentials: Credentials = _CREDENTIALS,
) -> Answer:
    """One signed request on a connection of its own; raises OSError or HTTPException without a whole answer."""
    url = urlsplit(endpoint)
    request = AWSRequest(
        method, endpoint + target, {**headers, "X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"}, body or b""
    )
    S3SigV4Auth(credentials, "s3", "us-east-1").add_auth(request)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=CALL_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request(method, target, body=body, headers=dict(request.headers.items()))
        response = connection.getresponse()
        told = {name.lower(): value for name, value in response.getheaders()}
        if response.status == 200 and not {"content-length", "transfer-encoding"} & told.keys():
            raise http.client.IncompleteRead(b"")  # cut within its head, which http.client does not notice
        return Answer(response.status, told, response.read())


# --- faults ----------------------------------------------------------------------------------------------------------
Fault = Callable[[Fleet, random.Random], contextlib.AbstractContextManager[None]]


def last_s(chance: random.Random, least: float, most: float) -> None:
    """A random moment is the point; nothing is expected of it."""
    time.sleep(chance.uniform(least, most))


@contextlib.contextmanager
def killed(fleet: Fleet, chance: random.Random) -> Iterator[None]:
    """One node's machine dies, and boots again: at once, or after its lease."""
    (host,) = fleet.hosts_of(chance, 1)
    host.kill()
    until(lambda: not fleet.on_its_way(), "what it had sent has arrived")
    try:
        yield
        last_s(chance, *chance.choice([(0.0, 1.0), (LEASE_S, 2 * LEASE_S)]))
        if fleet.takes_over:
            fleet.open_nodes = [node for node in fleet.cluster.nodes if node.running]
            until(fleet.takes_writes, "every key is served without the dead node")
    finally:
        host.restart()
        fleet.open_nodes = list(fleet.cluster.nodes)


@contextlib.contextmanager
def dark(fleet: Fleet, chance: random.Random) -> Iterator[None]:
    """The power fails when clients come to rest: in their last calls, or while nodes still do what follows. All nodes'
    machines die, and boot again: at once, or after all leases."""
    hosts = list(fleet.cluster.hosts)
    last_s(chance, *chance.choice([(0.0, 0.02), (0.1, 1.0)]))
    for host in hosts:
        host.kill()
    until(lambda: not fleet.on_its_way(), "what they had sent has arrived")
    try:
        yield
        last_s(chance, *chance.choice([(0.0, 1.0), (LEASE_S, 2 * LEASE_S)]))
    finally:
        fleet.box.start(*(server for host in hosts for server in host.servers))


@contextlib.contextmanager
def paused(fleet: Fleet, chance: random.Random) -> Iterator[None]:
    """One node's processes stand still: for a moment, or beyond its lease."""
    (host,) = fleet.hosts_of(chance, 1)
    host.pause()
    try:
        yield
        last_s(chance, *chance.choice([(0.1, 1.0), (LEASE_S, 2 * LEASE_S)]))
    finally:
        host.resume()


@contextlib.contextmanager
def parted(fleet: Fleet, chance: random.Random) -> Iterator[None]:
    """Two nodes do not reach each other."""
    one, other = fleet.hosts_of(chance, 2)
    with cut_off(one, other):
        yield
        last_s(chance, 0.1, 1.5 * LEASE_S)


@contextlib.contextmanager
def deaf(fleet: Fleet, chance: random.Random) -> Iterator[None]:
    """What one node sends to another is lost, one way."""
    one, other = fleet.hosts_of(chance, 2)
    one.cut(other)
    try:
        yield
        last_s(chance, 0.1, 1.5 * LEASE_S)
    finally:
        one.mend(other)


@contextlib.contextmanager
def alone(fleet: Fleet, chance: random.Random) -> Iterator[None]:
    """One node reaches its clients, and nobody else."""
    (one,) = fleet.hosts_of(chance, 1)
    others = [host for host in fleet.box.hosts.values() if host is not one]
    with cut_off(one, *others):
        yield
        last_s(chance, 0.1, 2 * LEASE_S)


@contextlib.contextmanager
def unagreed(fleet: Fleet, chance: random.Random) -> Iterator[None]:
    """One node does not reach etcd."""
    (one,) = fleet.hosts_of(chance, 1)
    members = [host for name, host in fleet.box.hosts.items() if name.startswith("etcd")]
    with cut_off(one, *members):
        yield
        last_s(chance, 0.1, 2 * LEASE_S)


@contextlib.contextmanager
def away(fleet: Fleet, chance: random.Random) -> Iterator[None]:
    """Nobody reaches the bucket service."""
    host = fleet.box.hosts["bucket"]
    host.unplug()
    try:
        yield
        last_s(chance, 0.1, 4.0)
    finally:
        host.plug()


@contextlib.contextmanager
def minority(fleet: Fleet, chance: random.Random) -> Iterator[None]:
    """One member of etcd dies and comes back."""
    host = fleet.box.hosts[f"etcd{chance.randrange(1, 4)}"]
    host.kill()
    try:
        yield
        last_s(chance, 0.1, LEASE_S)
    finally:
        host.restart()


@contextlib.contextmanager
def quorum(fleet: Fleet, chance: random.Random) -> Iterator[None]:
    """All of etcd dies and comes back: at once, or after all leases."""
    hosts = [fleet.box.hosts[f"etcd{number}"] for number in range(1, 4)]
    for host in hosts:
        host.kill()
    try:
        yield
        last_s(chance, *chance.choice([(0.1, 1.0), (LEASE_S, 2 * LEASE_S)]))
    finally:
        fleet.box.start(*(server for host in hosts for server in host.servers))


@contextlib.contextmanager
def joined(fleet: Fleet, chance: random.Random) -> Iterator[None]:
    """A node more; one less first, where there are many."""
    if len(fleet.cluster.nodes) >= NODES_MAX:
        with drained(fleet, chance):
            pass
    if len(fleet.cluster.nodes) < NODES_MAX:
        fleet.join()
    yield


def begin_to_drain(fleet: Fleet, chance: random.Random) -> Node:
    """Some node; enough stay."""
    if len(fleet.cluster.nodes) <= NODES_MIN:
        fleet.join()
    node = chance.choice(fleet.cluster.nodes)
    fleet.wish(node, "draining")
    return node


@contextlib.contextmanager
def drained(fleet: Fleet, chance: random.Random) -> Iterator[None]:
    """A node is drained. Once it is gone its machine is taken away, with its disks; else it is taken back."""
    node = begin_to_drain(fleet, chance)
    yield
    stays = "local" in fleet.kinds and not fleet.takes_over
    with contextlib.suppress(AssertionError) if stays else contextlib.nullcontext():
        until(lambda: fleet.state_of(node) == "gone", "it goes", timeout_s=LEAVES_WITHIN_S if stays else PATIENCE_S)
    if fleet.state_of(node) == "gone":
        fleet.open_nodes = [each for each in fleet.cluster.nodes if each is not node]
        last_s(chance, 0.0, 1.0)
        fleet.remove(node)
    else:
        fleet.wish(node, "active")


@contextlib.contextmanager
def lost(fleet: Fleet, chance: random.Random) -> Iterator[None]:
    """As many machines as may be are lost at once, with their disks. Once they are missed they are given up."""
    if not fleet.may_lose:
        with killed(fleet, chance):
            yield
        return
    while len(fleet.cluster.nodes) < NODES_MIN + fleet.may_lose:
        fleet.join()
    until(lambda: (states := fleet.states()) and fleet.is_covered(states), "all has its copies")
    pairs = list(zip(fleet.cluster.nodes, fleet.cluster.hosts, strict=True))
    gone = chance.sample(pairs, fleet.may_lose)
    fleet.open_nodes = [node for node, _ in pairs if node not in {each for each, _ in gone}]
    for _, host in gone:
        host.kill()
    until(lambda: not fleet.on_its_way(), "what they had sent has arrived")
    for node, _ in gone:
        fleet.remove(node)
    yield
    last_s(chance, *chance.choice([(0.0, 1.0), (LEASE_S, 2 * LEASE_S)]))
    for node, _ in gone:
        until(lambda node=node: fleet.state_of(node) == "missing", f"{node.host} is missed")
        fleet.wish(node, "gone")
    until(fleet.takes_writes, "every key is served without them")


@contextlib.contextmanager
def wavering(fleet: Fleet, chance: random.Random) -> Iterator[None]:
    """A node is drained and taken back at any moment, while something happens to it, or to another."""
    node = begin_to_drain(fleet, chance)
    other = chance.choice([None, paused, parted, alone, unagreed])
    (host,) = fleet.hosts_of(chance, 1)
    last_s(chance, 0.0, 2.0)
    if other is None:  # as `killed`; nothing more is promised, since what another node had may be taken over just now
        host.kill()
        until(lambda: not fleet.on_its_way(), "what it had sent has arrived")
    with contextlib.nullcontext() if other is None else other(fleet, chance):
        yield
        last_s(chance, *chance.choice([(0.0, 2.0), (LEASE_S, 2 * LEASE_S)]))
    fleet.wish(node, "active")
    if other is None:
        host.restart()


@contextlib.contextmanager
def failing(fleet: Fleet, chance: random.Random) -> Iterator[None]:
    """A disk of one node fails for good, and each read and write of it. Once the node does without, it is replaced."""
    whole = [(node, host) for node, host in zip(fleet.cluster.nodes, fleet.cluster.hosts, strict=True)]
    node, host = chance.choice(whole)
    disks = fleet.disks.get(host.name, [])
    if len(volumes_of(node)) < 2 or len(disks) < 2:  # it has not started since one failed
        with killed(fleet, chance):
            yield
        return
    disk = chance.choice(disks)
    fail_now(disk)
    yield
    others = {str(each) for each in disks if each != disk}
    until(lambda: volumes_of(node) == others, "the node does without its disk")
    fleet.replace_disk(disk)


def volumes_of(node: Node) -> set[str]:
    """The disks that it uses, or waits for."""
    with contextlib.suppress(ForebayError), node.client() as client:
        return {each.path for each in client.status().volumes if each.state in ("ok", "full") or each.owed_buckets}
    return set()


FAULTS: dict[str, Fault] = {
    "kill": killed,
    "dark": dark,
    "pause": paused,
    "part": parted,
    "deaf": deaf,
    "alone": alone,
    "unagreed": unagreed,
    "away": away,
    "minority": minority,
    "quorum": quorum,
    "join": joined,
    "drain": drained,
    "lose": lost,
    "waver": wavering,
    "disk": failing,
}
AT_REST = {"dark"}  # these strike while clients come to rest
