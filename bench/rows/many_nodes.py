"""Rows of many nodes, in the box (`bench/box.py`): links bind what nodes send, and are what is compared with.

What clients received is counted at their links, headers included (frames are of 9,000 bytes: 1 %). The rate of a link
counts them too.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import box_reader, load
from bench.box import Box, Host
from bench.cluster import Cluster, WeedCluster
from bench.parts import BUCKET, Lab, Node, upload_file
from bench.report import Result
from bench.row import MIB, REPORTED, Objects, Row
from bench.servers import Nginx, find_program
from bench.stats import bounded, compared
from forebay.core.messages.batch import Item
from forebay.core.placement import Members

CLIENTS = 4
WRITTEN = "written"  # a bucket of the crash
BATCH = 8
AT_ONCE = 24  # of each client: with fewer, by chance nobody asks a node now and then
SETTLE_S = 3.0  # until all links are full
RELAYED, PEER_READ = "forebay_relayed_bytes_total", "forebay_peer_read_bytes_total"
TICKS_S = 1.0 / os.sysconf("SC_CLK_TCK")


def _link_bit_s(row: Row) -> float:
    return row.link.rate_bytes_s * 8


class Reading:
    """A `bench/box_reader.py` on a host. `versions` are of what it wrote, after the `end`."""

    versions: dict[str, int]

    def __init__(self, host: Host, keys: Sequence[str], *arguments: str) -> None:
        command = [find_program("setpriv"), "--pdeathsig", "KILL", "--", *host.within]
        command += [sys.executable, "-m", "bench.box_reader", *arguments]
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(keys)) + "\n")
        self._process.stdin.flush()

    def end(self) -> tuple[list[tuple[float, float, str]], list[tuple[float, str, str]]]:
        """Reads and errors, after the end."""
        said, _ = self._process.communicate(timeout=300)
        if self._process.returncode:
            raise load.LoadFailed("a reader in the box failed: its message is above")
        found = json.loads(said)
        self.versions = found["versions"]
        return [tuple(read) for read in found["reads"]], [tuple(error) for error in found["errors"]]


def _random_file(lab: Lab, size_bytes: int) -> Path:
    path = lab.dir / f"box-{size_bytes}"
    if not path.exists():
        with open(path, "wb") as file:
            for start in range(0, size_bytes, 16 * MIB):  # `randbytes` of 1 GiB overflows
                file.write(random.randbytes(min(16 * MIB, size_bytes - start)))
    return path


def _upload(cluster: Cluster, keys: Sequence[str], path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: cluster.upload(key, path), keys))


# --- all clients, all nodes ------------------------------------------------------------------------------------------
def aggregate(lab: Lab, row: Row) -> Result:
    """What four clients get of one, two and four nodes, and of SeaweedFS on as many hosts."""
    (objects,) = row.quick if lab.quick else row.objects
    path = _random_file(lab, objects.size_bytes)
    sizes = (1, 2) if lab.quick else (1, 2, 4)
    rounds = 1 if lab.quick else row.rounds
    rates: dict[str, list[float]] = {}
    spreads: list[float] = []
    errors: list[tuple[float, str, str]] = []
    with Box() as box:
        clients = [box.host(f"client{number + 1}") for number in range(CLIENTS)]
        cluster = Cluster(box, 1, up_bit_s=_link_bit_s(row))
        uploaded: set[str] = set()
        for size in sizes:
            cluster.grow(size - len(cluster.nodes))
            cluster.add_bucket(BUCKET)
            owned = cluster.balanced(objects.name, objects.count)
            keys = [key for own in owned for key in own]
            _upload(cluster, [key for key in keys if key not in uploaded], path)
            uploaded.update(keys)
            for number, own in enumerate(owned):
                cluster.warm(number, own)
            for turn in range(rounds):
                sdk = [
                    ["--sdk", cluster.nodes[(turn + at) % size].endpoint, "--bucket", BUCKET] for at in range(CLIENTS)
                ]
                rate, spread = _received(clients, sdk, keys, cluster.hosts, row.seconds, errors)
                rates.setdefault(f"{size} nodes", []).append(rate)
                spreads.append(spread)
    for size in sizes:
        with Box() as box:
            clients = [box.host(f"client{number + 1}") for number in range(CLIENTS)]
            weed = WeedCluster(box, size, up_bit_s=_link_bit_s(row))
            paths = _fill_weed(weed, path, size * objects.count)
            http = [["--http", *weed.endpoints]] * CLIENTS
            for _ in range(rounds):
                rate, _spread = _received(clients, http, paths, weed.hosts, row.seconds, [])
                rates.setdefault(f"weed {size}", []).append(rate)
    measures = []
    for size in sizes:
        ours, links = rates[f"{size} nodes"], [size * row.link.rate_bytes_s] * rounds
        measures.append(compared(f"{size} nodes / links", "B/s", row.goals["of the links"], ours, links, "links"))
        measures.append(
            compared(
                f"{size} nodes / SeaweedFS", "B/s", row.goals["of SeaweedFS"], ours, rates[f"weed {size}"], "seaweedfs"
            )
        )
    measures.append(bounded("node spread", "", row.goals["node spread"], spreads))
    measures.append(bounded("reads that failed", "", row.goals["failed"], [float(len(errors))]))
    return Result(row, tuple(measures), notes=tuple(f"{key}: {said}" for _, key, said in errors[:4]))


def _received(
    clients: Sequence[Host],
    arguments: Sequence[Sequence[str]],
    keys: Sequence[str],
    senders: Sequence[Host],
    seconds: float,
    errors: list[tuple[float, str, str]],
) -> tuple[float, float]:
    """Bytes a second that all clients received together, and how much the senders differ, over their mean. What failed
    is added to `errors`."""
    readings = [
        Reading(host, keys, *how, "--at-once", str(AT_ONCE), "--seed", str(number))
        for number, (host, how) in enumerate(zip(clients, arguments, strict=True))
    ]
    floor = sum(host.carried()[1] for host in clients)
    while sum(host.carried()[1] for host in clients) - floor < len(senders) * MIB:
        time.sleep(0.1)  # until they read at all
    time.sleep(SETTLE_S)
    began, before = time.monotonic(), [host.carried()[1] for host in clients]
    sent = [host.carried()[0] for host in senders]
    time.sleep(seconds)
    took, after = time.monotonic() - began, [host.carried()[1] for host in clients]
    shares = [host.carried()[0] - then for host, then in zip(senders, sent, strict=True)]
    for reading in readings:
        errors += reading.end()[1]
    return (sum(after) - sum(before)) / took, (max(shares) - min(shares)) * len(shares) / sum(shares)


def _fill_weed(weed: WeedCluster, path: Path, count: int) -> list[str]:
    """Paths of so many objects."""
    keys = [f"weed/{number:05d}" for number in range(count)]
    for number, key in enumerate(keys):
        upload_file(weed.gateways[number % len(weed.gateways)], key, path)
    return [f"/{BUCKET}/{key}" for key in keys]


# --- one large object ------------------------------------------------------------------------------------------------
def large(lab: Lab, row: Row) -> Result:
    """One object, one client with a fast link, four nodes."""
    (objects,) = row.quick if lab.quick else row.objects
    count = 2 if lab.quick else 4
    rates = []
    with Box() as box:
        client = box.host("client")
        cluster = Cluster(box, count, up_bit_s=_link_bit_s(row))
        cluster.add_bucket(BUCKET)
        cluster.upload("large", _random_file(lab, objects.size_bytes))
        with cluster.nodes[0].client() as asked:
            asked.get(BUCKET, "large")  # now each node has its stripes
        for _ in range(1 if lab.quick else row.rounds):
            reading = Reading(client, ["large"], "--sdk", cluster.nodes[0].endpoint, "--bucket", BUCKET, "--once")
            reads, errors = reading.end()
            if errors:
                raise load.LoadFailed(str(errors[0]))
            rates.append(objects.size_bytes / (reads[0][1] - reads[0][0]))
    links = [count * row.link.rate_bytes_s] * len(rates)
    return Result(row, (compared("rate", "B/s", row.goals["rate"], rates, links, "links"),))


# --- through another node --------------------------------------------------------------------------------------------
class _Relay(Nginx):
    """nginx that passes on what `upstream` serves, and keeps nothing."""

    def __init__(self, upstream: str) -> None:
        super().__init__(Path())
        self._upstream = upstream

    def command(self) -> list[str]:
        command = super().command()
        config = self.dir / "nginx.conf"
        head, _, _ = config.read_text().partition("    server {")
        config.write_text(
            f"{head}\n    access_log off; proxy_http_version 1.1; proxy_set_header Connection '';\n"
            "    proxy_buffers 16 64k; proxy_buffer_size 64k; proxy_busy_buffers_size 256k;\n"
            "    proxy_max_temp_file_size 0;\n"
            f"    upstream owner {{ server {self._upstream.removeprefix('http://')}; keepalive 32; }}\n"
            f"    server {{ listen {self.host}:{self.ports[0]}; location / {{ proxy_pass http://owner; }} }}\n}}\n"
        )
        return command


def through(lab: Lab, row: Row) -> Result:
    """Reads through a node that has nothing of what another owns, and what that costs it: the first time, when it keeps
    nothing either, and the second time, when it does."""
    (objects,) = row.quick if lab.quick else row.objects
    path = _random_file(lab, objects.size_bytes)
    ours, owners, nginx_cpu = [], [], []
    first_cpu, second_cpu = list[float](), list[float]()
    with Box() as box:
        client = box.host("client")
        cluster = Cluster(box, 2, up_bit_s=_link_bit_s(row))
        cluster.add_bucket(BUCKET)
        relay = cluster.hosts[1].place(_Relay(cluster.nodes[0].endpoint))
        box.start(relay)
        passing = cluster.nodes[1]

        def fresh(name: str) -> list[str]:
            keys = cluster.balanced(f"{objects.name}-{name}", objects.count)[0]
            _upload(cluster, keys, path)
            cluster.warm(0, keys)
            return [f"/-/v1/objects/{BUCKET}/{key}" for key in keys]

        def rate(endpoint: str, paths: list[str]) -> float:
            reads, errors = Reading(client, paths, "--http", endpoint, "--at-once", "4", "--once").end()
            if errors:
                raise load.LoadFailed(str(errors[0]))
            took = max(end for _, end, _ in reads) - min(begin for begin, _, _ in reads)
            return objects.size_bytes * len(reads) / took

        def passed_on(paths: list[str], counter: str) -> float:
            """The rate through the node; what it says it had from the owner must be all of it."""
            told = passing.counter(counter)
            got = rate(passing.endpoint, paths)
            if (told := passing.counter(counter) - told) < 0.99 * objects.size_bytes * len(paths):
                raise load.LoadFailed(f"only {told:.0f} bytes came from the owner")
            return got

        gigabytes = objects.bytes_total / 1e9
        rounds = range(1 if lab.quick else row.rounds)
        for turn in rounds:
            paths = fresh(f"shaped-{turn}")
            ours.append(passed_on(paths, RELAYED))
            owners.append(rate(cluster.nodes[0].endpoint, paths))
        for host in cluster.hosts:
            host.shape()
        for turn in rounds:
            paths = fresh(f"free-{turn}")
            for spent, counter in ((first_cpu, RELAYED), (second_cpu, PEER_READ)):
                before = _cpu_s(passing)
                passed_on(paths, counter)
                spent.append((_cpu_s(passing) - before) / gigabytes)
            before = _cpu_s_of(relay.pid)
            rate(relay.url, paths)
            nginx_cpu.append((_cpu_s_of(relay.pid) - before) / gigabytes)
    return Result(
        row,
        (
            compared("rate / the owner's", "B/s", row.goals["rate"], ours, owners, "owner"),
            compared("CPU of a GB / nginx", "s/GB", row.goals["CPU"], first_cpu, nginx_cpu, "nginx"),
            compared("CPU of a GB read again / nginx", "s/GB", REPORTED, second_cpu, nginx_cpu, "nginx"),
        ),
        notes=("what is read again through the node it keeps (hashed, in a file) and serves by itself the next time",),
    )


def _cpu_s(node: Node) -> float:
    return sum(_cpu_s_of(pid) for pid in node.processes())


def _cpu_s_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICKS_S


# --- a second copy before the answer ---------------------------------------------------------------------------------
def replicated(lab: Lab, row: Row) -> Result:
    """PUTs at their home that are on two nodes before the answer, beside the slower of what carries the second copy:
    the home's link (the same files from nginx there), and the disk (which all nodes share) taking each byte twice."""
    (objects,) = row.quick if lab.quick else row.objects
    path = _random_file(lab, objects.size_bytes)
    body = path.read_bytes()
    ours, links, disks = [], [], []
    with Box() as box:
        client = box.host("client")
        cluster = Cluster(box, 2, up_bit_s=_link_bit_s(row))
        cluster.add_bucket(BUCKET, "back", copies=2)
        sender = cluster.hosts[0].place(Nginx(path.parent))
        box.start(sender)
        box.hosts["bucket"].unplug()  # a flush would take its share of the link
        for turn in range(2 if lab.quick else row.rounds):
            keys = cluster.balanced(f"{objects.name}-{turn}", objects.count)[0]
            began = time.perf_counter()
            with cluster.nodes[0].client() as home, ThreadPoolExecutor(row.connections) as pool:
                list(pool.map(lambda key, home=home: home.put(BUCKET, key, body), keys))
            ours.append(objects.bytes_total / (time.perf_counter() - began))
            disks.append(_synced_twice(lab, objects, body, row.connections))
            reads, errors = Reading(client, [f"/{path.name}"] * objects.count, "--http", sender.url, "--once").end()
            if errors:
                raise load.LoadFailed(str(errors[0]))
            took_s = max(end for _, end, _ in reads) - min(begin for begin, _, _ in reads)
            links.append(objects.bytes_total / took_s)
            if (kept := cluster.nodes[1].counter("forebay_kept_copies")) < objects.count * (turn + 1):
                raise load.LoadFailed(f"the other node keeps {kept:.0f} copies")
        with cluster.nodes[1].client() as other:
            if other.get(BUCKET, keys[0]) != body:
                raise load.LoadFailed("what was put at one node is not what the other reads")
    limits = [min(link, disk) for link, disk in zip(links, disks, strict=True)]
    goal = row.goals["rate"]
    return Result(
        row,
        (
            compared("rate / min(disk, link)", "B/s", goal, ours, limits, "limit"),
            compared("rate / link", "B/s", REPORTED, ours, links, "link"),
            compared("rate / disk", "B/s", REPORTED, ours, disks, "disk"),
        ),
        notes=("both nodes are on one disk: its limit is each body written and synced twice",),
    )


def _synced_twice(lab: Lab, objects: Objects, body: bytes, writers: int) -> float:
    """Bytes a second of bodies, each written to two files that are synced."""
    folder = lab.dir / "twice"
    folder.mkdir(exist_ok=True)

    def write(number: int) -> None:
        for copy in range(2):
            fd = os.open(folder / f"{number}-{copy}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                left = memoryview(body)
                while left:
                    left = left[os.write(fd, left[:MIB]) :]
                os.fsync(fd)
            finally:
                os.close(fd)

    began = time.perf_counter()
    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(write, range(objects.count)))
    rate = objects.bytes_total / (time.perf_counter() - began)
    for file in folder.iterdir():
        file.unlink()
    return rate


# --- what the backend sends ------------------------------------------------------------------------------------------
def cold(lab: Lab, row: Row) -> Result:
    """What the bucket sends when all nodes read one object at once, and when one that came reads what others have."""
    one, many = row.quick if lab.quick else row.objects
    count = 2 if lab.quick else 4
    once = []
    with Box() as box:
        cluster = Cluster(box, count)
        cluster.add_bucket(BUCKET)
        source = box.hosts["bucket"]
        keys = [one.key(turn) for turn in range(1 if lab.quick else row.rounds)]
        _upload(cluster, keys, _random_file(lab, one.size_bytes))
        for key in keys:
            before = source.carried()[0]
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(lambda number, key=key: cluster.warm(number, [key]), range(count)))
            once.append((source.carried()[0] - before) / one.size_bytes)
        keys = [many.key(number) for number in range(many.count)]
        _upload(cluster, keys, _random_file(lab, many.size_bytes))
        cluster.warm(0, keys)
        cluster.grow(1)
        cluster.add_bucket(BUCKET)
        own = set(cluster.balanced(many.name, many.count)[count]) & set(keys)
        before = source.carried()[0]
        cluster.warm(count, keys)
        joined = (source.carried()[0] - before) / many.bytes_total
    return Result(
        row,
        (
            bounded("all read it at once: bucket's bytes / object", "", row.goals["once"], once),
            bounded("after a join: bucket's bytes / data", "", row.goals["joined"], [joined]),
        ),
        notes=(
            "counted at the bucket's link, the heads of every answer included",
            f"of {many.count} objects {len(own)} became the newcomer's own: it asks whose they were",
        ),
    )


# --- a corpus that fits the cluster, but no node ---------------------------------------------------------------------
def fits(lab: Lab, row: Row) -> Result:
    """What the bucket sends for each epoch after the first, when three nodes hold so much of the corpus each."""
    (objects,) = row.quick if lab.quick else row.objects
    count, measures = 3, []
    for share in (0.5, 0.4):
        with Box() as box:
            cluster = Cluster(box, count, capacity_bytes=int(share * objects.bytes_total))
            cluster.add_bucket(BUCKET)
            source = box.hosts["bucket"]
            owned = cluster.balanced(objects.name, objects.count // count)
            keys = [key for own in owned for key in own]
            _upload(cluster, keys, _random_file(lab, objects.size_bytes))
            sent = []
            for epoch in range(1 + (1 if lab.quick else row.rounds)):
                random.Random(epoch).shuffle(keys)
                before = source.carried()[0]
                with ThreadPoolExecutor(count) as ranks:
                    list(ranks.map(_read, cluster.nodes, [keys[rank::count] for rank in range(count)]))
                sent.append((source.carried()[0] - before) / (len(keys) * objects.size_bytes))
            name = f"{count} nodes of {share:g} of the corpus"
            measures.append(bounded(f"{name}: bucket's bytes / corpus", "", row.goals["sent"], sent[1:]))
    return Result(
        row,
        tuple(measures),
        notes=(
            "each rank reads its share of a new random order at its own node, as a loader does; epochs 2 and later",
        ),
    )


def _read(node: Node, keys: Sequence[str]) -> None:
    with node.client() as client:
        for first in range(0, len(keys), BATCH):
            client.get_many([Item(BUCKET, key) for key in keys[first : first + BATCH]])


# --- a join ----------------------------------------------------------------------------------------------------------
def joined(lab: Lab, row: Row) -> Result:
    """A node comes while three have files that no backend has: until it holds its part, and all is on two nodes."""
    (objects,) = row.quick if lab.quick else row.objects
    body = _random_file(lab, objects.size_bytes).read_bytes()
    beyond, whole, moved, failed, notes = [], [], [], [], []
    for _ in range(1 if lab.quick else row.rounds):
        with Box() as box:
            clients = [box.host(f"client{number}") for number in range(2)]
            cluster = Cluster(box, 3, up_bit_s=_link_bit_s(row), takes_over=True)
            cluster.add_bucket(WRITTEN, "back", copies=2)
            box.hosts["bucket"].unplug()  # so that all stays dirty
            keys = [objects.key(number) for number in range(objects.count)]
            with cluster.nodes[0].client() as client, ThreadPoolExecutor(row.connections) as pool:
                list(pool.map(lambda key, client=client: client.put(WRITTEN, key, body), keys))
            cluster.wait_covered()
            how = ("--sdk", cluster.nodes[0].endpoint, "--bucket", WRITTEN, "--at-once", "1")
            written = [f"written/{number}" for number in range(64)]
            users = [Reading(clients[0], keys, *how), Reading(clients[1], written, *how, "--write")]
            time.sleep(SETTLE_S)
            began = time.monotonic()
            senders = cluster.hosts[:]
            cluster.start(1)
            answers, before = time.monotonic(), sum(host.carried()[0] for host in senders)
            cluster.wait_agreed()
            cluster.wait_covered()
            ended, sent = time.monotonic(), sum(host.carried()[0] for host in senders) - before
            time.sleep(SETTLE_S)
            failed.append(0.0)
            for user in users:
                _, errors = user.end()
                failed[-1] += len(errors)
                notes += [f"{when - began:+.1f} s: {key}: {said}" for when, key, said in errors[:2]]
            came = _kept_by(cluster.nodes[-1], keys) * objects.size_bytes
            moved.append(came / objects.bytes_total)
            whole.append(ended - answers)
            beyond.append(ended - answers - sent / (3 * row.link.rate_bytes_s))
            with cluster.nodes[-1].client() as client:
                if any(client.get(WRITTEN, key) != body for key in random.sample(keys, 16)):
                    raise load.LoadFailed("the newcomer does not read what was written before it came")
    return Result(
        row,
        (
            bounded("beyond what three links take for what they sent", "s", row.goals["beyond"], beyond),
            bounded("until all is on two nodes", "s", REPORTED, whole),
            bounded("moved / written", "", REPORTED, moved),
            bounded("reads and writes that failed", "", row.goals["failed"], failed),
        ),
        notes=(
            "from the newcomer's first answer on; readers and a writer use the links meanwhile",
            *notes[:4],
        ),
    )


def _kept_by(newcomer: Node, keys: Sequence[str]) -> int:
    """How many keys have one of their two copies at a node that came last: it is the first or the second of them."""
    with newcomer.client() as client:
        nodes, own = client.node_map().nodes, client.status().node_id
    members = Members({node.node_id: node.weight for node in nodes})
    kept = sum(own in members.order(WRITTEN, key)[:2] for key in keys)
    if newcomer.counter("forebay_kept_copies") < kept:
        raise load.LoadFailed(f"the newcomer keeps fewer than the {kept} copies that it should")
    return kept


# --- a crash ---------------------------------------------------------------------------------------------------------
def crash(lab: Lab, row: Row) -> Result:
    """A machine of four goes away, without a word, while clients read, and write what no backend has."""
    (objects,) = row.quick if lab.quick else row.objects
    count, lease_s = (3, 3.0) if lab.quick else (4, 10.0)
    waited: list[list[float]] = [[], [], [], []]
    failed, lost_writes, notes = [], [], []
    for _ in range(1 if lab.quick else row.rounds):
        with Box() as box:
            clients = [box.host(f"client{number}") for number in range(4)]
            cluster = Cluster(box, count, lease_s=lease_s, takes_over=True)
            cluster.add_bucket(BUCKET)
            cluster.add_bucket(WRITTEN, "back", copies=2)
            owned = cluster.balanced(objects.name, objects.count)
            _upload(cluster, [key for own in owned for key in own], _random_file(lab, objects.size_bytes))
            for number, own in enumerate(owned):
                cluster.warm(number, own)
            lost, kept = owned[-1], [key for own in owned[:-1] for key in own]
            how = ("--sdk", cluster.nodes[0].endpoint, "--bucket", BUCKET, "--at-once", "4")
            readings = [Reading(host, keys, *how) for host, keys in zip(clients, (lost, kept), strict=False)]
            writes = ("--sdk", cluster.nodes[0].endpoint, "--bucket", WRITTEN, "--at-once", "4", "--write")
            written = cluster.on_two_nodes(WRITTEN, cluster.nodes[-1], objects.count)
            cluster.wait_covered()
            readings += [Reading(host, keys, *writes) for host, keys in zip(clients[2:], written, strict=True)]
            time.sleep(2 * SETTLE_S)
            cluster.hosts[-1].unplug()
            crashed = time.monotonic()
            cluster.hosts[-1].kill()
            time.sleep(lease_s + 10)
            failed.append(0)
            lost_writes.append(0)
            for number, reading in enumerate(readings):
                reads, errors = reading.end()
                waited[number].append(longest_gap(sorted(end for _, end, _ in reads if end > crashed - 1), crashed))
                failed[-1] += len(errors) if number < 2 else 0
                lost_writes[-1] += _older(cluster.nodes[0], reading.versions)
                notes += [f"{when - crashed:+.1f} s: {key}: {said}" for when, key, said in errors[:2]]
    limit = row.goals["works again"]
    return Result(
        row,
        (
            bounded("its keys: longest without a read", "s", limit, waited[0]),
            bounded("others: longest without a read", "s", row.goals["others"], waited[1]),
            bounded("its keys: longest without a write", "s", limit, waited[2]),
            bounded("others: longest without a write", "s", row.goals["others"], waited[3]),
            bounded("reads that failed", "", row.goals["failed"], [float(number) for number in failed]),
            bounded("acknowledged writes lost", "", row.goals["failed"], [float(number) for number in lost_writes]),
        ),
        notes=tuple(notes[:6]),
    )


def _older(node: Node, acknowledged: dict[str, int]) -> int:
    """Of how many keys a node has an older version than was acknowledged."""
    with node.client() as client:
        return sum(
            box_reader.version_of(bytes(client.get(WRITTEN, key))) < version for key, version in acknowledged.items()
        )


def longest_gap(ends: Sequence[float], since: float) -> float:
    """The longest time without the end of a read."""
    later = [end for end in ends if end >= since]
    if not later:
        return math.inf
    return max(after - before for before, after in zip([since, *later], later, strict=False))


# --- placement -------------------------------------------------------------------------------------------------------
def placement(lab: Lab, row: Row) -> Result:
    """A million keys on 256 nodes of two sizes, beside as many drawn at random, and what a leave moves."""
    (objects,) = row.quick if lab.quick else row.objects
    nodes = 16 if lab.quick else 256
    weights = {f"{number:016x}": 1.0 + number % 2 for number in range(nodes)}
    members, total = Members(weights), sum(weights.values())
    keys = [objects.key(number) for number in range(objects.count)]
    home = [members.first(BUCKET, key) for key in keys]
    drawn = random.Random(1).choices(list(weights), list(weights.values()), k=len(keys))

    def worst(found: Sequence[str]) -> float:
        counts = dict.fromkeys(weights, 0)
        for name in found:
            counts[name] += 1
        return max(abs(counts[name] * total / (len(keys) * weights[name]) - 1) for name in weights)

    leaver = min(weights)
    rest = Members({name: weight for name, weight in weights.items() if name != leaver})
    moved = sum(rest.first(BUCKET, key) != was for key, was in zip(keys, home, strict=True) if was != leaver)
    return Result(
        row,
        (
            compared("worst load / weight, beyond 1", "", row.goals["load"], [worst(home)], [1.0]),
            compared("the same, keys drawn at random", "", row.goals["drawn"], [worst(drawn)], [1.0]),
            bounded("keys of others that a leave moves", "", row.goals["moved"], [float(moved)]),
        ),
        notes=(
            "docs/design/0016-placement-balance.md says why the first cannot be 0.03 with so few keys on so many nodes",
        ),
    )
