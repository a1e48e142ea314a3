"""What `forebay doctor` makes of the facts: pure rules, each with its reason and what to change.

Theory. Collecting facts (`facts.py`) touches disks and sockets and decides nothing; judging them is here, in functions
from facts to findings, so that every rule is tested with made-up facts. A finding is *ok* (looked at and fine), *warn*
(works, but slower or nearer to an edge than it should) or *bad* (something does not work, or soon will not). A fact
that could not be found out is never ok: it is a warning that says so.

Invariants. (1) Every finding that is not ok says what to change. (2) The same facts give the same findings in the same
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from forebay.core import limits, quantity
from forebay.core.messages.node_state import NodeState

Level = Literal["ok", "warn", "bad"]


class Finding(msgspec.Struct, frozen=True):
    """`subject` is what was looked at (a path, a bucket); `change` is empty exactly where `level` is ok."""

    check: str
    level: Level
    subject: str
    what: str
    change: str = ""


class DiskFacts(msgspec.Struct, frozen=True):
    """Of one volume's directory. `xattr`, `punch`: None where it could not be tried; `error` says why not."""

    path: str
    filesystem: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    inodes_total: int = 0
    inodes_free: int = 0
    xattr: bool | None = None
    punch: bool | None = None
    sync_s: float | None = None  # median of a 4 KiB write and fsync
    write_bytes_s: float | None = None  # 16 MiB written and synced
    measured: bool = True  # False: timing was not asked for
    error: str = ""
    above: str = ""  # the directory that was looked at, if `path` is not there


class LimitFacts(msgspec.Struct, frozen=True):
    """Of this process, whose limits a node started from here would get; None where unknown."""

    files_soft: int | None = None
    files_hard: int | None = None
    map_count: int | None = None
    shm_free_bytes: int | None = None
    memory_available_bytes: int | None = None


class ClockFacts(msgspec.Struct, frozen=True):
    """This machine's clock against the Date header of `source`, in seconds; positive is ahead."""

    source: str
    skew_s: float | None = None
    error: str = ""


class NodeFacts(msgspec.Struct, frozen=True):
    """The directory and the URL, and how they fit together. `port_holder` is set when no node answers and yet
    somebody listens at the URL."""

    dir: str
    url: str
    locked: bool = False
    said_pid: int = 0
    said_endpoint: str = ""
    answers: bool = False
    ready: bool = False
    error: str = ""
    port_holder: str = ""
    leftovers: int = 0  # temporary files of a node that no longer runs
    state: NodeState | None = None


class BucketFacts(msgspec.Struct, frozen=True):
    """What the bucket's probe said: `kind` is empty where it went well."""

    name: str
    url: str
    kind: str = ""
    message: str = ""


class VersionFacts(msgspec.Struct, frozen=True):
    forebay: str
    node: str
    python: str
    kernel: str
    libraries: dict[str, str] = {}


class MemberFacts(msgspec.Struct, frozen=True):
    """One member of an etcd, asked alone; `error` says why it did not answer."""

    address: str
    version: str = ""
    cluster: str = ""
    leads: bool = False
    troubles: tuple[str, ...] = ()  # alarms, in its own words
    error: str = ""


class EtcdFacts(msgspec.Struct, frozen=True):
    """The etcd that a cluster agrees in. `agreed_s`: how long a read took that needs a majority of its members."""

    members: list[MemberFacts]
    agreed_s: float | None = None
    error: str = ""


class Facts(msgspec.Struct, frozen=True):
    """Everything that was looked at."""

    disks: list[DiskFacts]
    limits: LimitFacts
    clocks: list[ClockFacts]
    node: NodeFacts
    buckets: list[BucketFacts]
    versions: VersionFacts
    etcd: EtcdFacts | None = None


# --- thresholds, each with its reason --------------------------------------------------------------------------------
FREE_BAD_BYTES = 2 * limits.BLOCK_BYTES  # the store takes no volume below this
FREE_WARN_SHARE = 0.05  # filesystems slow down when nearly full
INODES_WARN = 100_000  # one data file for each cached object above 16 KiB
SYNC_WARN_S = 0.05  # an SSD syncs in 1 ms, a disk in 10: beyond this something else is wrong
WRITE_WARN_BYTES_S = 200e6  # slower than a usual bucket: the first epoch would wait for the disk
FILES_BAD = 1024  # listeners, index and engine need some hundred before the first client
MAP_COUNT_WARN = 65_530  # the kernel's default; index maps and native threads share it
SHM_WARN_BYTES = 64 * limits.MIB  # Docker's default, on which DataLoader workers stumble
MEMORY_WARN_BYTES = limits.PASS_BYTES_MAX + 256 * limits.MIB
AGREED_WARN_S = (
    0.5  # a renewal of a lease that takes longer than T/6 is late; members of one site agree in milliseconds
)
SKEW_WARN_S, SKEW_BAD_S = 30.0, 300.0  # S3 refuses signatures beyond 15 minutes; freshness is counted in seconds
NETWORK_FILESYSTEMS = frozenset(("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre"))
MEMORY_FILESYSTEMS = frozenset(("tmpfs", "ramfs"))


def judge(facts: Facts) -> list[Finding]:
    """All findings, in the order of the report."""
    found = list(node(facts.node))
    for disk_facts in facts.disks:
        found += disk(disk_facts)
    found += process_limits(facts.limits)
    for clock_facts in facts.clocks:
        found.append(clock(clock_facts))
    for bucket_facts in facts.buckets:
        found.append(bucket(bucket_facts))
    if facts.node.state is not None:
        found += node_state(facts.node.state)
    if facts.etcd is not None:
        found += etcd(facts.etcd)
    found += versions(facts.versions)
    return found


def worst(findings: list[Finding]) -> Level:
    """The worst level among the findings."""
    levels = {finding.level for finding in findings}
    return "bad" if "bad" in levels else "warn" if "warn" in levels else "ok"


def node(facts: NodeFacts) -> Iterator[Finding]:
    """Whether a node runs, answers, and is the one of the directory."""
    if facts.answers and facts.ready:
        yield Finding("node", "ok", facts.url, "a node answers and is ready")
    elif facts.answers:
        yield Finding("node", "bad", facts.url, "a node answers and is not ready", f"see {facts.dir}/log/node.log")
    elif facts.port_holder:
        yield Finding(
            "port",
            "bad",
            facts.url,
            f"the port is taken by {facts.port_holder}",
            "stop that, or start the node elsewhere with --listen and set FOREBAY_URL",
        )
    elif facts.locked and facts.said_endpoint and facts.said_endpoint != facts.url:
        yield Finding(
            "node",
            "bad",
            facts.url,
            f"no node answers here; the node of {facts.dir} listens at {facts.said_endpoint}",
            f"export FOREBAY_URL={facts.said_endpoint}",
        )
    elif facts.locked:
        yield Finding(
            "node",
            "bad",
            facts.url,
            f"a node holds {facts.dir} and does not answer ({facts.error or 'no answer'})",
            f"see {facts.dir}/log/node.log; `forebay down` and `forebay up` start it again",
        )
    else:
        yield Finding("node", "warn", facts.url, "no node answers", "start one with `forebay up`")
    if not facts.locked and facts.said_pid and not facts.answers:
        yield Finding(
            "leftovers",
            "warn",
            facts.dir,
            f"run/node.json names process {facts.said_pid}, which is not this node any more: it was killed",
            "nothing to do: the next `forebay up` cleans up",
        )
    if not facts.locked and facts.leftovers:
        yield Finding(
            "leftovers",
            "warn",
            facts.dir,
            f"{facts.leftovers} temporary files of a node that was killed",
            "nothing to do: the next `forebay up` removes them",
        )


def disk(facts: DiskFacts) -> Iterator[Finding]:
    """Whether the directory can be a volume, and a good one."""
    at = facts.path
    if facts.error:
        yield Finding("disk", "bad", at, facts.error, "make the directory writable, or name another with --volume")
        return
    free = f"{quantity.size(facts.free_bytes)} free of {quantity.size(facts.total_bytes)}"
    if facts.above:
        free += f"; it is not there, so this is {facts.above}"
    if facts.free_bytes < FREE_BAD_BYTES:
        yield Finding("space", "bad", at, free, "free some space, or name another disk with --volume")
    elif facts.free_bytes < FREE_WARN_SHARE * facts.total_bytes:
        yield Finding("space", "warn", at, free, "free some space, or bound the cache with --capacity")
    else:
        yield Finding("space", "ok", at, free)
    if facts.inodes_total and facts.inodes_free < INODES_WARN:
        yield Finding(
            "inodes",
            "warn",
            at,
            f"{facts.inodes_free} free of {facts.inodes_total}: as many objects above 16 KiB can be cached",
            "remove small files, or make the filesystem with more inodes (mkfs.ext4 -i 16384; XFS needs none)",
        )
    yield from _filesystem(facts)
    if facts.measured:
        yield from _speed(facts)


def _filesystem(facts: DiskFacts) -> Iterator[Finding]:
    at, kind = facts.path, facts.filesystem or "unknown"
    if kind in NETWORK_FILESYSTEMS:
        yield Finding("filesystem", "bad", at, f"{kind} is on the network", "use a local disk: ext4 or XFS")
        return
    if kind in MEMORY_FILESYSTEMS:
        yield Finding("filesystem", "warn", at, f"{kind} is memory: a restart empties the cache", "use a local disk")
    missing = [name for name, has in (("extended attributes", facts.xattr), ("hole punching", facts.punch)) if not has]
    if missing:
        yield Finding(
            "filesystem",
            "bad",
            at,
            f"{kind} lacks {' and '.join(missing)}",
            "use ext4 or XFS; overlayfs and old network filesystems lack them",
        )
    elif kind not in MEMORY_FILESYSTEMS:
        shown = kind if facts.filesystem else "unknown kind (no mount table names it),"
        yield Finding("filesystem", "ok", at, f"{shown} with extended attributes and hole punching")


def _speed(facts: DiskFacts) -> Iterator[Finding]:
    if facts.sync_s is None or facts.write_bytes_s is None:
        yield Finding("speed", "warn", facts.path, "could not be measured", "see that there are 16 MiB to write")
        return
    what = f"a synced 4 KiB write takes {quantity.duration(facts.sync_s)}; {quantity.rate(facts.write_bytes_s)} written"
    if facts.sync_s > SYNC_WARN_S:
        change = "look for a failing disk or a busy neighbour: `dmesg`, `iostat -x 1`"
        yield Finding("speed", "warn", facts.path, what, change)
    elif facts.write_bytes_s < WRITE_WARN_BYTES_S:
        change = "a faster local disk: the first read of an object waits for this one"
        yield Finding("speed", "warn", facts.path, what, change)
    else:
        yield Finding("speed", "ok", facts.path, what)


def process_limits(facts: LimitFacts) -> Iterator[Finding]:
    """What the kernel lets a process of this user have."""
    yield _files(facts)
    if facts.map_count is not None and facts.map_count < MAP_COUNT_WARN:
        yield Finding(
            "maps", "warn", "vm.max_map_count", str(facts.map_count), f"sysctl -w vm.max_map_count={MAP_COUNT_WARN}"
        )
    if facts.shm_free_bytes is not None:
        free = f"{quantity.size(facts.shm_free_bytes)} free"
        if facts.shm_free_bytes < SHM_WARN_BYTES:
            change = (
                "DataLoader workers need it: `docker run --shm-size=8g`, or an emptyDir of medium Memory at /dev/shm"
            )
            yield Finding("shm", "warn", "/dev/shm", free, change)
        else:
            yield Finding("shm", "ok", "/dev/shm", free)
    if facts.memory_available_bytes is None:
        yield Finding("memory", "warn", "memory", "cannot be told", "see that /proc/meminfo is readable")
    elif facts.memory_available_bytes < MEMORY_WARN_BYTES:
        yield Finding(
            "memory",
            "warn",
            "memory",
            f"{quantity.size(facts.memory_available_bytes)} available",
            f"leave at least {quantity.size(MEMORY_WARN_BYTES)} for reads that no disk takes",
        )
    else:
        yield Finding("memory", "ok", "memory", f"{quantity.size(facts.memory_available_bytes)} available")


def _files(facts: LimitFacts) -> Finding:
    if facts.files_soft is None:
        return Finding("files", "warn", "open files", "the limit cannot be told", "see `ulimit -n`")
    wanted = limits.CONNECTIONS_MAX + limits.FRONT_FILES_OPEN_MAX + 256  # a front with all the clients it may have
    most = max(facts.files_soft, facts.files_hard or 0)
    what = f"{facts.files_soft} allowed, {facts.files_hard} on request"
    change = f"ulimit -n {wanted}, or LimitNOFILE={wanted} in the service's unit"
    if most <= FILES_BAD:
        return Finding("files", "bad", "open files", what, change)
    if most < wanted:
        return Finding(
            "files", "warn", "open files", f"{what}; {wanted} are needed for all the clients allowed", change
        )
    return Finding("files", "ok", "open files", what)


def clock(facts: ClockFacts) -> Finding:
    """Whether this machine agrees with the backend on the time."""
    if facts.skew_s is None:
        return Finding(
            "clock", "warn", facts.source, f"cannot be compared: {facts.error}", "check that it is reachable"
        )
    word = "ahead" if facts.skew_s > 0 else "behind"
    what = f"{quantity.duration(abs(facts.skew_s))} {word}" if abs(facts.skew_s) >= 1.5 else "agrees to the second"
    if abs(facts.skew_s) >= SKEW_BAD_S:
        change = "set the clock (`timedatectl set-ntp true`): backends refuse signatures with a wrong time"
        return Finding("clock", "bad", facts.source, what, change)
    if abs(facts.skew_s) >= SKEW_WARN_S:
        return Finding("clock", "warn", facts.source, what, "set the clock: `timedatectl set-ntp true`")
    return Finding("clock", "ok", facts.source, what)


def etcd(facts: EtcdFacts) -> Iterator[Finding]:
    """Whether the members answer, belong together, have a majority and room."""
    for member in facts.members:
        if member.error:
            yield Finding("etcd", "warn", member.address, member.error, "start it, or correct the endpoint")
        else:
            leads = ", and leads" if member.leads else ""
            yield Finding("etcd", "ok", member.address, f"version {member.version} answers{leads}")
    clusters = {member.cluster: member.address for member in facts.members if member.cluster}
    if len(clusters) > 1:
        what = f"these are of {len(clusters)} different clusters"
        yield Finding("etcd", "bad", ", ".join(sorted(clusters.values())), what, "name members of one cluster alone")
    if facts.agreed_s is None:
        change = "start more of its members: without a majority no node joins or leaves"
        yield Finding("etcd", "bad", "majority", facts.error, change)
    elif facts.agreed_s > AGREED_WARN_S:
        what = f"agrees within {quantity.duration(facts.agreed_s)}"
        yield Finding("etcd", "warn", "majority", what, "give its members faster disks, or processors of their own")
    else:
        yield Finding("etcd", "ok", "majority", f"agrees within {quantity.duration(facts.agreed_s)}")
    for trouble in sorted({trouble for member in facts.members for trouble in member.troubles}):
        change = "`etcdctl compact` and `defrag` make room, `etcdctl alarm disarm` ends it; let etcd compact by itself"
        yield Finding("etcd", "bad", "alarm", f"{trouble}: it takes no change", change)


_BUCKET_CHANGES = {
    "NotFound": "check the name in the backend URL, or remove the bucket with `forebay bucket rm {name}`",
    "NoBackendBucket": "bring it back (mount it) or correct the URL; or remove the bucket: `forebay bucket rm {name}`",
    "Denied": "check the credentials the node was started with (environment, profile or --option) and their policy",
    "Unavailable": "check the network and the endpoint (--option endpoint=…); reads of what is cached go on",
    "Invalid": "check the backend URL and options: `forebay bucket show {name}`",
}


def bucket(facts: BucketFacts) -> Finding:
    """Whether the backend answers the node with its credentials."""
    subject = f"{facts.name} ({facts.url})"
    if not facts.kind:
        return Finding("bucket", "ok", subject, "the backend answers")
    if facts.kind == "NotSupported":
        return Finding("bucket", "warn", subject, f"cannot be probed: {facts.message}", "read an object to see")
    change = _BUCKET_CHANGES.get(facts.kind, "see the node's log").format(name=facts.name)
    return Finding("bucket", "bad", subject, f"{facts.kind}: {facts.message}", change)


def node_state(state: NodeState) -> Iterator[Finding]:
    """What the node says of itself."""
    for volume in state.volumes:
        if volume.state == "ok":
            yield Finding(
                "volume",
                "ok",
                volume.path,
                f"{quantity.counted(volume.objects, 'object')}, {quantity.size(volume.used_bytes)}",
            )
        elif volume.state == "full":
            change = "give it more --capacity or another --volume: until eviction catches up, reads pass it by"
            yield Finding("volume", "warn", volume.path, "full", change)
        elif volume.state not in ("out", "failing"):
            level: Level = "bad" if volume.owed_buckets else "warn"
            what = f"{volume.state}: {volume.reason}"
            if volume.owed_buckets:
                what += (
                    f"; it owes {quantity.counted(volume.owed_objects, 'object')} of {', '.join(volume.owed_buckets)}"
                )
            yield Finding("volume", level, volume.path, what, volume.change)
        else:
            change = "check the disk (`dmesg`, SMART), then restart the node; reads go on without it"
            yield Finding("volume", "bad", volume.path, f"{volume.state}: {volume.reason or 'no reason given'}", change)
    for held in state.buckets:
        if held.lost_objects:
            what = f"acknowledged and lost: {quantity.counted(held.lost_objects, 'object')}"
            change = f"check the disk; `forebay lost ls {held.name}`, then write them again or give them up"
            yield Finding("lost", "bad", held.name, what, change)
        if held.flush_error and held.dirty_objects:
            what = f"on this node alone: {quantity.counted(held.dirty_objects, 'object')} or deletes"
            what += f" ({quantity.size(held.dirty_bytes)})"
            change = (
                f"mend the backend, or its keys with `forebay bucket set {held.name} --option …`; writes stop in time"
            )
            yield Finding("flush", "bad", held.name, f"{what}: the flush failed of {held.flush_error}", change)
    for node in state.cluster.nodes if state.cluster is not None else []:
        if node.kept_once:
            what = "of buckets with two copies, what no backend has may be on this node alone"
            change = "seconds after a node comes or goes that is over; if it stays, start another node, and see the log"
            yield Finding("copies", "warn", node.address, what, change)
    for name, why in state.cluster.lagging.items() if state.cluster is not None else ():
        change = "mend that; the node tries again by itself. Until then the bucket is here as it was"
        yield Finding("shared bucket", "warn", name, f"not yet as the cluster has it: {why}", change)
    lost = [front.front for front in state.fronts if not front.connected]
    if lost:
        yield Finding(
            "fronts",
            "warn",
            state.endpoint,
            f"fronts {', '.join(map(str, lost))} are not connected to the engine",
            "they are restarted by themselves; if this stays, see the node's log",
        )
    if state.pass_bytes > limits.PASS_BYTES_MAX // 2:
        yield Finding(
            "pass-through",
            "warn",
            state.endpoint,
            f"{quantity.size(state.pass_bytes)} of reads pass through memory because no disk takes them",
            "look at the volumes above: they are full, failing or too slow",
        )


def versions(facts: VersionFacts) -> Iterator[Finding]:
    """Whether the pieces belong together."""
    what = f"forebay {facts.forebay}, Python {facts.python}, Linux {facts.kernel}"
    libraries = ", ".join(f"{name} {version}" for name, version in facts.libraries.items() if version)
    missing = [name for name, version in facts.libraries.items() if not version]
    if missing:
        yield Finding("versions", "bad", "this installation", f"{', '.join(missing)} missing", "pip install forebay")
    elif facts.node and facts.node != facts.forebay:
        yield Finding(
            "versions",
            "warn",
            "this installation",
            f"the node is of version {facts.node} and this program of {facts.forebay}",
            "restart the node: `forebay down`, `forebay up`",
        )
    else:
        yield Finding("versions", "ok", "this installation", f"{what}; {libraries}" if libraries else what)
