"""Looks at this machine for `forebay doctor`: bounded in time, changes nothing, decides nothing (`findings.py` does).

Theory. Every look is small and may fail alone: what cannot be found out becomes None or an error text in its facts, so
that one broken disk or firewall does not hide the rest. Disks are measured with a few synced writes to a file without a
name, which vanishes by itself.
"""

from __future__ import annotations

import asyncio
import email.utils
import errno
import importlib.metadata
import os
import platform
import resource
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import forebay
from forebay.backends.s3.credentials import find_endpoint
from forebay.client import local_node
from forebay.client.connection import Connection, parse_url
from forebay.client.sync import Client, connect
from forebay.core.errors import ForebayError, Invalid
from forebay.core.messages.http1 import Request
from forebay.core.types import Bucket
from forebay.health.findings import (
    BucketFacts,
    ClockFacts,
    DiskFacts,
    EtcdFacts,
    Facts,
    LimitFacts,
    MemberFacts,
    NodeFacts,
    VersionFacts,
)
from forebay.meta.etcd import parse_url as parse_etcd_url
from forebay.meta.etcd_link import GREETING, Access, Address, Members, named
from forebay.ports import clock

PATIENCE_S = 5.0  # for each thing that is asked over the network
SYNCS = 8
WRITE_BYTES = 16 * 1024 * 1024
LIBRARIES = ("obstore", "lmdb", "uvloop", "msgspec", "xxhash", "awscrt")
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
T = TypeVar("T")


def collect(
    dir: str | None,
    url: str | None,
    volumes: Iterable[str],
    *,
    measure: bool,
    cluster: str | None = None,
    access: Access = Access(),  # it is a value
) -> Facts:
    """Everything `judge` wants to know. `Invalid` if `cluster` is no etcd URL."""
    addresses = parse_etcd_url(cluster)[0] if cluster else []
    at = local_node.directory(dir)
    with connect(url, patience_s=PATIENCE_S) as client:
        node = look_at_node(at, client)
        nothing: list[Bucket] = []
        buckets = _or(client.buckets, nothing) if node.answers else nothing
        probed = [probe(client, bucket) for bucket in buckets]
    paths = list(volumes) or [volume.path for volume in node.state.volumes] if node.state else list(volumes)
    return Facts(
        disks=[look_at_disk(path, measure=measure) for path in paths or [str(at / "volumes" / "v0")]],
        limits=look_at_limits(),
        clocks=[compare_clock(endpoint) for endpoint in endpoints(buckets, node=client.url)],
        node=node,
        buckets=probed,
        versions=look_at_versions(node.state.version if node.state else ""),
        etcd=asyncio.run(look_at_etcd(addresses, access)) if addresses else None,
    )


def _or(look: Callable[[], T], otherwise: T) -> T:
    try:
        return look()
    except (ForebayError, OSError):
        return otherwise


# --- node ------------------------------------------------------------------------------------------------------------
def look_at_node(at: Path, client: Client) -> NodeFacts:
    """Whether the directory is held, and whether the URL answers."""
    said = local_node.said(at)
    endpoint, state, error, ready = client.endpoint, None, "", False
    try:
        state = client.status()
        ready = client.ready()
    except ForebayError as trouble:
        error = trouble.message
    held = ""
    if state is None and endpoint.host in ("127.0.0.1", "::1", "localhost"):
        host = "127.0.0.1" if endpoint.host == "localhost" else endpoint.host
        locked_here = local_node.is_locked(at) and parse_or_none(said.endpoint) == endpoint
        if not locked_here and local_node.port_taken(host, endpoint.port):
            held = str(local_node.holder(host, endpoint.port))
    return NodeFacts(
        dir=str(at),
        url=client.url,
        locked=local_node.is_locked(at),
        said_pid=said.pid,
        said_endpoint=said.endpoint,
        answers=state is not None,
        ready=ready,
        error=error,
        port_holder=held,
        leftovers=_leftovers(at),
        state=state,
    )


def parse_or_none(url: str) -> object:
    """The endpoint, or None for what is not a URL."""
    try:
        return parse_url(url) if url else None
    except Invalid:
        return None


def _leftovers(at: Path) -> int:
    try:
        return sum(1 for _ in at.glob("volumes/*/tmp/*"))
    except OSError:
        return 0


def probe(client: Client, bucket: Bucket) -> BucketFacts:
    """Ask the node to ask the backend."""
    try:
        client.bucket_check(bucket.name)
    except ForebayError as error:
        return BucketFacts(bucket.name, bucket.url, error.kind, error.message)
    return BucketFacts(bucket.name, bucket.url)


# --- disks -----------------------------------------------------------------------------------------------------------
def look_at_disk(path: str, *, measure: bool) -> DiskFacts:
    """The filesystem under `path`; a directory that is not there yet is looked at through its nearest parent."""
    at = Path(path)
    while not at.exists() and at != at.parent:
        at = at.parent
    try:
        space = os.statvfs(at)
        kind = filesystem_of(str(at))
        xattr, punch, sync_s, write_bytes_s = try_disk(at, measure=measure)
    except OSError as error:
        return DiskFacts(path, error=f"{error.strerror or error}")
    return DiskFacts(
        path=path,
        filesystem=kind,
        total_bytes=space.f_blocks * space.f_frsize,
        free_bytes=space.f_bavail * space.f_frsize,
        inodes_total=space.f_files,
        inodes_free=space.f_favail,
        xattr=xattr,
        punch=punch,
        sync_s=sync_s,
        write_bytes_s=write_bytes_s,
        measured=measure,
        above="" if at == Path(path) else str(at),
    )


def try_disk(at: Path, *, measure: bool) -> tuple[bool, bool, float | None, float | None]:
    """Extended attributes, hole punching, median seconds of a synced 4 KiB write, bytes per second written."""
    fd = open_nameless(at)
    try:
        xattr = _works(lambda: os.setxattr(fd, "user.forebay.doctor", b"1"))
        os.pwrite(fd, bytes(65536), 0)
        punch = _punch(fd)
        if not measure:
            return xattr, punch, None, None
        times = []
        for number in range(SYNCS):
            started = clock.monotonic_s()
            os.pwrite(fd, os.urandom(4096), number * 4096)
            os.fdatasync(fd)
            times.append(clock.monotonic_s() - started)
        block = os.urandom(1 << 20)
        started = clock.monotonic_s()
        for offset in range(0, WRITE_BYTES, len(block)):
            os.pwrite(fd, block, offset)
        os.fdatasync(fd)
        return xattr, punch, statistics.median(times), WRITE_BYTES / max(clock.monotonic_s() - started, 1e-9)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return xattr, True, None, None
        raise
    finally:
        os.close(fd)


def open_nameless(at: Path) -> int:
    """A new file in the directory that has no name, or had one for a moment."""
    try:
        return os.open(at, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    name = at / f".forebay-doctor-{os.getpid()}"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.unlink(name)
    return fd


def _works(action: Callable[[], object]) -> bool:
    try:
        action()
    except OSError:
        return False
    return True


def _punch(fd: int) -> bool:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    mode = _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE
    return bool(libc.fallocate(fd, mode, ctypes.c_int64(4096), ctypes.c_int64(8192)) == 0)


def filesystem_of(path: str) -> str:
    """The kind of filesystem that `path` is on, as /proc/self/mounts names it; "" where it cannot be told: there is no
    such table, or it does not name the root (in a chroot whose root is no mount point)."""
    try:
        table = Path("/proc/self/mounts").read_text("utf-8", "surrogateescape")
    except OSError:
        return ""
    return filesystem_in(table, os.path.realpath(path))


def filesystem_in(table: str, real: str) -> str:
    """The kind that the mount table gives the path `real`, which holds no links; "" if it says nothing of it."""
    best, kind = "", ""
    for text in table.splitlines():
        _, mount, found, *_ = text.split(" ")
        mount = mount.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        inside = mount == "/" or real == mount or real.startswith(mount + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, found
    return kind


# --- limits, clock, versions -----------------------------------------------------------------------------------------
def look_at_limits() -> LimitFacts:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 30  # stands for "no limit"
    try:
        shm = os.statvfs("/dev/shm")
        shm_free: int | None = shm.f_bavail * shm.f_frsize
    except OSError:
        shm_free = None
    return LimitFacts(
        files_soft=most if soft == resource.RLIM_INFINITY else soft,
        files_hard=most if hard == resource.RLIM_INFINITY else hard,
        map_count=_number_in("/proc/sys/vm/max_map_count"),
        shm_free_bytes=shm_free,
        memory_available_bytes=_available(),
    )


def _number_in(path: str) -> int | None:
    try:
        return int(Path(path).read_text("ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _available() -> int | None:
    try:
        for text in Path("/proc/meminfo").read_text("ascii").splitlines():
            if text.startswith("MemAvailable:"):
                return int(text.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def endpoints(buckets: Iterable[Bucket], node: str = "") -> list[str]:
    """The URLs whose clocks count for these buckets, each once. S3 clients of this shell may be told that S3 is `node`:
    that says nothing about where the node's own S3 is."""
    found: dict[str, None] = {}
    environment = {name: text for name, text in os.environ.items() if not node or not same_url(text, node)}
    for bucket in buckets:
        options = {
            name.lower().removeprefix("aws_").removesuffix("_url"): text for name, text in bucket.options.items()
        }
        scheme = bucket.url.partition("://")[0]
        parts = urlsplit(bucket.url)
        if scheme == "s3":
            region = options.get("region") or "us-east-1"
            found[find_endpoint(options, environment) or f"https://s3.{region}.amazonaws.com"] = None
        elif options.get("endpoint"):
            found[options["endpoint"]] = None
        elif scheme == "gs":
            found["https://storage.googleapis.com"] = None
        elif scheme in ("http", "https"):
            found[f"{scheme}://{parts.netloc}"] = None
    return list(found)


def same_url(text: str, node: str) -> bool:
    """Whether `text` is the node's URL, written in one of the usual ways."""
    return text.replace("//localhost:", "//127.0.0.1:").rstrip("/") == node


def compare_clock(url: str) -> ClockFacts:
    """The Date header of any answer of `url` against this machine's clock. Sends no credentials."""
    try:
        endpoint = parse_url(url)
        if endpoint.scheme == "http" and ":" not in urlsplit(url).netloc.rpartition("@")[2]:
            endpoint = endpoint._replace(port=80)
        connection = Connection(endpoint, PATIENCE_S)
        try:
            before_s = clock.wall_s()
            answer = connection.exchange(Request("HEAD", "/"), (("User-Agent", "forebay"), ("Connection", "close")))
            now_s = (before_s + clock.wall_s()) / 2
        finally:
            connection.close()
        said = email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp()
    except ForebayError as error:
        why = getattr(error.__cause__, "strerror", None) or error.message  # its message is about a node
        return ClockFacts(url, error=why)
    except (KeyError, ValueError, TypeError):
        return ClockFacts(url, error="the answer has no Date header")
    return ClockFacts(url, now_s - said - 0.5)  # the header is cut to whole seconds


async def look_at_etcd(addresses: list[Address], access: Access = Access()) -> EtcdFacts:
    """Ask each member alone, and then all of them what only a majority can answer."""
    members = await asyncio.gather(*(_look_at_member(address, access) for address in addresses))
    together = Members(addresses, PATIENCE_S, access)
    try:
        began_s = clock.monotonic_s()
        await together.read(*GREETING)
        agreed_s = clock.monotonic_s() - began_s
        return EtcdFacts(members, agreed_s)
    except ForebayError as error:
        return EtcdFacts(members, error=error.message)
    finally:
        await together.aclose()


async def _look_at_member(address: Address, access: Access) -> MemberFacts:
    alone = Members([address], PATIENCE_S, access)
    try:
        status = await alone.read("/v3/maintenance/status", {})
        own = status["header"].get("member_id", "")
        cluster = str(status["header"].get("cluster_id", ""))
        troubles = tuple(str(trouble).strip() for trouble in status.get("errors", ()))
        return MemberFacts(
            named(address), str(status.get("version", "")), cluster, status.get("leader") == own, troubles
        )
    except ForebayError as error:
        return MemberFacts(named(address), error=error.message)
    finally:
        await alone.aclose()


def look_at_versions(node_version: str) -> VersionFacts:
    libraries = {}
    for name in LIBRARIES:
        try:
            libraries[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            libraries[name] = ""
    return VersionFacts(forebay.__version__, node_version, platform.python_version(), platform.release(), libraries)
