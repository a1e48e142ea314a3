"""What goes wrong around a real node in a storm: each fault strikes, lasts a while, and passes.

`Sea` is the node with all that it stands on: a SeaweedFS behind a link of ours (answers can be lost there, and it can
be slow or away), and two volumes of equal weight, so that each has half of the keys. The second is small, and can be
full, absent or frozen. That takes disks of its own, and so the superuser; a disk that can be frozen takes a loop device
with ext4 as well. Where they cannot be had, these faults do not strike, and the storm says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import http.client
import itertools
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from bench import servers
from bench.shaper import Shaper
from forebay.core.placement import Members
from forebay.node.store.disk.volume import read_mark
from forebay.sim.clients import Answer, body_of
from tests.node.conftest import NodeProcess
from tests.patience import until
from tests.storm.careful import CarefulGate
from tests.storm.judging import MIB, stalled

KINDS = ("through", "back", "hasty", "own")
VOLUME_BYTES, SMALL_VOLUME_BYTES = 600 * MIB, 160 * MIB
CALL_TIMEOUT_S = 45.0
EXT4_SHUTDOWN, WITHOUT_ITS_LOG = 0x8004587D, 2  # EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH of Linux
FRONTS = 2


class Sea:
    """A node, its bucket service and its volumes. `ask` is a client's call."""

    def __init__(self, folder: Path, name: str, seaweed: servers.SeaweedFS) -> None:
        self.seaweed, self.folder = seaweed, folder
        self.buckets = [f"{name}-{kind}" for kind in KINDS]
        self.backed = self.buckets[:-1]
        for bucket in self.backed:
            seaweed.create_bucket(bucket)
        self.gate = CarefulGate(seaweed.port)
        self.link = Shaper(f"127.0.0.1:{self.gate.port}")
        self.first, self.second, self._behind = (folder / each for each in ("first", "second", "behind"))
        for each in (self.first, self.second, self._behind):
            each.mkdir(parents=True)
        self.has_mounts = os.geteuid() == 0
        self.cannot: dict[str, str] = {}  # faults that cannot strike here, and why
        self.is_disturbed = False  # processes of the node may be killed or stopped: nobody promises answers meanwhile
        self.healthy: list[tuple[str, str, bytes]] = []  # objects on the volume that nothing strikes
        volumes = ["--volume", str(self.first), "--volume", str(self.second)]
        # A stop may find the bucket away: what is not flushed then is left for the next start.
        flags = ["--fronts", str(FRONTS), "--capacity", "300MiB", "--flush-timeout", "2", *volumes]
        self.node = NodeProcess(folder, *flags)

    def __enter__(self) -> Sea:
        self.gate.start()
        self.link.start()
        if self.has_mounts:
            mount_memory(self.first, VOLUME_BYTES)
            self.cannot = mount_disk(self._behind, SMALL_VOLUME_BYTES)
            self.mount()
        else:
            self.cannot = dict.fromkeys(NEEDS_MOUNTS, "disks of one's own take the superuser")
        self.node.start()
        for bucket, kind in zip(self.buckets, KINDS, strict=True):
            self._add_bucket(bucket, kind)
        until(self.is_settled, "the node is settled")
        self._place_healthy()
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()
        with contextlib.suppress(Exception):
            self.node.stop()
        if self.node.process is not None and self.node.process.poll() is None:
            self.node.process.kill()
        self.link.stop()
        self.gate.stop()
        if self.has_mounts:
            for each in (self.second, self._behind, self.first):
                subprocess.run(["umount", "-l", str(each)], check=False, stderr=subprocess.DEVNULL)

    def _place_healthy(self) -> None:
        """Put some objects whose keys belong to the first volume."""
        marks = [read_mark(str(volume)) for volume in (self.first, self.second)]
        members = Members({mark.id: mark.weight for mark in marks if mark is not None})
        assert marks[0] is not None
        assert len(set(members.weights)) == 1, "each volume has half of the keys"
        for bucket, kind in zip(self.buckets, KINDS, strict=True):
            for size_bytes in (700, 400_000):
                keys = (f"healthy/{size_bytes}-{number}" for number in itertools.count())
                key = next(key for key in keys if members.first(bucket, key) == marks[0].id)
                body = body_of(f"{bucket} {key}", size_bytes)
                assert self.ask("PUT", f"/{bucket}/{key}", {}, body).status == 200
                if kind != "through":  # its durable home is the bucket service, which other faults may strike
                    self.healthy.append((bucket, key, body))

    def _add_bucket(self, bucket: str, kind: str) -> None:
        body: dict[str, object] = {"name": bucket, "url": f"s3://{bucket}", "freshness_s": 1e18, "write": "back"}
        body["options"] = {**self.seaweed.options(), "endpoint": self.link.endpoint}
        body |= {
            "through": {"write": "through"},
            "back": {"durability": "disk"},
            "hasty": {"durability": "memory"},
            "own": {"write": "local", "url": "local://", "options": {}},
        }[kind]
        self.node.json("PUT", f"buckets/{bucket}", body)

    # --- what clients and the judge ask ------------------------------------------------------------------------------
    def ask(self, method: str, target: str, headers: dict[str, str], body: bytes | None) -> Answer:
        return _asked(self.node.endpoint, method, target, headers, body)

    def is_settled(self) -> bool:
        try:
            state = self.node.json("GET", "status")
            ready = self.ask("GET", "/-/readyz", {}, None).status == 200
        except (OSError, AssertionError, http.client.HTTPException):
            return False
        is_used = all(volume["state"] in ("ok", "full") for volume in state["volumes"])
        return (
            ready
            and is_used
            and state["reads"] == 0
            and state["flights"] == 0
            and len(self.node.children()) == FRONTS + 1
        )

    def asks(self) -> dict[str, Callable[[], bool]]:
        """What is answered rightly whatever happens to the second volume, and to the bucket service."""

        def reads(bucket: str, key: str, body: bytes) -> bool:
            answer = self.ask("GET", f"/{bucket}/{key}", {}, None)
            assert answer.status == 200, answer
            return answer.body == body

        def writes(bucket: str, key: str, body: bytes) -> bool:
            answer = self.ask("PUT", f"/{bucket}/{key}", {}, body)
            assert answer.status == 200, answer
            return True

        found: dict[str, Callable[[], bool]] = {
            "status": lambda: bool(self.node.json("GET", "status")),
            "readyz": lambda: self.ask("GET", "/-/readyz", {}, None).status == 200,
        }
        for each in self.healthy:
            found[f"GET of {each[0]}/{each[1]}"] = functools.partial(reads, *each)
            found[f"PUT of {each[0]}/{each[1]}"] = functools.partial(writes, *each)
        return found

    def listed(self, bucket: str, endpoint: str = "") -> dict[str, str]:
        """Keys and ETags, as the node lists them; with `endpoint`, as that server does. Without the healthy ones."""
        target = f"/{bucket}?list-type=2"
        answer = until(lambda: (a := _asked(endpoint or self.node.endpoint, "GET", target)).status == 200 and a, target)
        found = re.findall(r"<Key>([^<]+)</Key>.*?<ETag>([^<]+)</ETag>", answer.body.decode(), re.DOTALL)
        plain = {key: etag.replace("&quot;", '"').replace("&#34;", '"') for key, etag in found}
        return {key: etag for key, etag in plain.items() if not key.startswith("healthy/")}

    def behind(self, bucket: str, key: str) -> bytes:
        """What the bucket service itself holds."""
        answer = _asked(self.seaweed.endpoint, "GET", f"/{bucket}/{key}")
        assert answer.status == 200, answer
        return answer.body

    def flush(self) -> None:
        for bucket in self.backed:
            job = self.node.json("POST", "flush", {"bucket": bucket})
            path = f"jobs/{job['job']}"
            done = until(lambda path=path: (s := self.node.json("GET", path))["state"] != "running" and s, "a flush")
            assert (done["state"], done["units_failed"]) == ("done", 0), done

    # --- the second volume -------------------------------------------------------------------------------------------
    def mount(self) -> None:
        subprocess.run(["mount", "--bind", str(self._behind), str(self.second)], check=True)

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.second)], check=True)

    def stop_or_kill(self, chance: random.Random) -> None:
        assert self.node.process is not None
        if chance.random() < 0.5:
            self.node.stop()
        else:
            self.node.process.kill()
            self.node.process.wait()
            self.cut()

    def cut(self) -> None:
        """What the node had sent when it was killed has landed, or does not: no node can know of what lands later."""
        self.link.cut()
        until(self.gate.is_idle, "the gate is idle")

    def fill(self) -> None:
        """Take what is left of the small volume's disk."""
        with open(self._behind / "filler", "wb") as filler:
            for piece_bytes in (MIB, 4096):
                with contextlib.suppress(OSError):
                    while True:
                        os.posix_fallocate(filler.fileno(), os.fstat(filler.fileno()).st_size, piece_bytes)

    def freeze(self) -> None:
        """Writes to the small volume's disk hang from now on; reads do not."""
        subprocess.run(["fsfreeze", "-f", str(self._behind)], check=True)

    def thaw(self) -> None:
        """The opposite; nothing where it is not frozen."""
        subprocess.run(["fsfreeze", "-u", str(self._behind)], check=False, capture_output=True)

    def empty(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._behind / "filler").unlink()


def _asked(
    endpoint: str, method: str, target: str, headers: dict[str, str] | None = None, body: bytes | None = None
) -> Answer:
    """One request on a connection of its own; raises OSError or HTTPException without a whole answer."""
    url = urlsplit(endpoint)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=CALL_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request(method, target, body=body, headers=headers or {})
        response = connection.getresponse()
        told = {name.lower(): value for name, value in response.getheaders()}
        if response.status == 200 and not {"content-length", "transfer-encoding"} & told.keys():
            raise http.client.IncompleteRead(b"")  # cut within its head, which http.client does not notice
        return Answer(response.status, told, response.read())


# --- disks -----------------------------------------------------------------------------------------------------------
def mount_memory(path: Path, size_bytes: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)], check=True)


def mount_disk(path: Path, size_bytes: int) -> dict[str, str]:
    """A disk that can be frozen, or else memory; what cannot be done with it, and why."""
    image = path.with_suffix(".img")
    with open(image, "wb") as file:
        file.truncate(size_bytes)
    try:
        for command in (["mkfs.ext4", "-q", "-F", "-m", "0"], ["mount", "-o", "loop"]):
            subprocess.run([*command, str(image), *([str(path)] if "mount" in command else [])], check=True)
        shutil.rmtree(path / "lost+found")
        subprocess.run(["fsfreeze", "-f", str(path)], check=True)
        subprocess.run(["fsfreeze", "-u", str(path)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        subprocess.run(["umount", str(path)], check=False, capture_output=True)
        mount_memory(path, size_bytes)
        return {"frozen": str(error)}
    return {}


def fail_now(disk: Path) -> None:
    """As a disk that dies: every read and write of it is an error from now on."""
    folder = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(folder, EXT4_SHUTDOWN, struct.pack("I", WITHOUT_ITS_LOG))
    finally:
        os.close(folder)


# --- faults ----------------------------------------------------------------------------------------------------------
def pause_s(chance: random.Random, least: float, most: float) -> None:
    """A random moment is the point; nothing is expected of it."""
    time.sleep(chance.uniform(least, most))


@contextlib.contextmanager
def killed(sea: Sea, chance: random.Random) -> Iterator[None]:
    there = sea.node.children()
    whom = chance.choice([["engine"], ["engine"], ["front 0"], ["engine", "front 0", "front 1"], ["supervisor"]])
    for name in whom:
        if name in there:
            os.kill(there[name], signal.SIGKILL)
    if whom == ["supervisor"] and sea.node.process is not None:
        sea.node.process.kill()
        sea.node.process.wait()
        sea.node.start()
    sea.cut()
    yield


@contextlib.contextmanager
def paused(sea: Sea, chance: random.Random) -> Iterator[None]:
    there = sea.node.children()
    whom = chance.choice([["engine"], ["front 0"], ["front 1"], ["front 0", "front 1"]])
    pids = [there[name] for name in whom if name in there]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        yield
        pause_s(chance, 0.1, 1.5)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def answers_lost(sea: Sea, chance: random.Random) -> Iterator[None]:
    sea.link.set(fault="reset-after=1", count=chance.randrange(1, 6))
    try:
        yield
    finally:
        sea.link.set(fault="none", count=0)


@contextlib.contextmanager
def slow(sea: Sea, chance: random.Random) -> Iterator[None]:
    sea.link.set(latency_s=chance.uniform(0.05, 0.5), rate_bytes_s=chance.choice([2e6, 20e6]))
    try:
        yield
    finally:
        sea.link.set(latency_s=0.0, rate_bytes_s=0.0)


@contextlib.contextmanager
def away(sea: Sea, chance: random.Random) -> Iterator[None]:
    sea.link.set(fault="refuse")
    sea.link.cut()
    try:
        yield
        pause_s(chance, 0.0, 2.0)
    finally:
        sea.link.set(fault="none")


@contextlib.contextmanager
def full(sea: Sea, chance: random.Random) -> Iterator[None]:
    sea.fill()
    try:
        yield
        pause_s(chance, 0.0, 1.0)
    finally:
        sea.empty()


@contextlib.contextmanager
def absent(sea: Sea, chance: random.Random) -> Iterator[None]:
    """The node is started without its second volume, and started again when that is back."""
    sea.stop_or_kill(chance)
    sea.unmount()
    sea.node.start()
    try:
        yield
        pause_s(chance, 0.0, 1.0)
    finally:
        sea.stop_or_kill(chance)
        sea.mount()
        sea.node.start()


@contextlib.contextmanager
def frozen(sea: Sea, chance: random.Random) -> Iterator[None]:
    """Nothing that concerns the other volume alone is held up, however long it lasts."""
    thawing = threading.Timer(chance.uniform(1.0, 5.0), sea.thaw)
    sea.freeze()
    try:
        if sea.is_disturbed:
            thawing.start()  # a process that hangs in a write cannot even be killed, and nobody waits for it for ever
        yield
        if not sea.is_disturbed:
            wrong = stalled(sea.asks())
            assert not wrong, f"while a disk was frozen, without an answer or with a wrong one: {wrong}"
    finally:
        thawing.cancel()
        sea.thaw()


FAULTS = {
    "kill": killed,
    "pause": paused,
    "lost": answers_lost,
    "slow": slow,
    "away": away,
    "full": full,
    "absent": absent,
    "frozen": frozen,
}
NEEDS_MOUNTS = {"full", "absent", "frozen"}
DISTURBING = {"kill", "pause", "absent"}
