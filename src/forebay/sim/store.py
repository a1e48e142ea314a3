"""The store's shell in the simulator: performs commit plans on a simulated disk, one effect at a time.

Theory. `core.machines.commit` says what to do in which order; this does it with a pause before every effect, in which
anything else may happen, a crash included. Plans about one object are performed one after the other, each made when its
turn comes, since a plan is about the record as it is then. After a crash `core.machines.recover` says what the files
mean.

The clean index is a dict that a process crash keeps and a machine crash loses; the durable one survives both.

Invariants. (1) A plan is cut only between effects. (2) A hole is punched only while nobody holds a lease on the file,
and not at all if the block came back meanwhile.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import xxhash

from forebay.core.machines import commit, recover
from forebay.core.machines.commit import Effect, StoredVersion
from forebay.sim.backend import Name
from forebay.sim.disk import DiskFull, File, SimDisk
from forebay.sim.schedule import Schedule

Header = tuple[Name, int, str, int, bool]  # of what, object id, version, size, made by a durable write

BLOCK_BYTES = 64
INLINE_BYTES_MAX = 16


def sum_of(data: bytes | bytearray) -> int:
    return xxhash.xxh3_64_intdigest(data)


def blocks_of(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES)


@dataclass(slots=True)
class Record:
    """What the index says of an object."""

    name: Name
    object_id: int
    path: str
    version: str
    size_bytes: int
    blocks: set[int] = field(default_factory=set)
    unverified: set[int] = field(default_factory=set)
    inline: bytes | None = None
    checked_us: int = 0
    durable: bool = False

    @property
    def place(self) -> StoredVersion:
        return StoredVersion(*self.name, self.object_id, self.path, self.durable)

    def has(self, start: int, end: int) -> bool:
        return self.inline is not None or all(
            block in self.blocks for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        )


@dataclass(slots=True)
class Subject:
    """What the shell holds while it performs a plan: the version, its bytes where it writes them, whom to tell."""

    version: str
    size_bytes: int
    checked_us: Callable[[], int] = int
    data: bytes = b""
    landed: set[int] | None = None  # of a file that has a record: what is new, since others may have gone meanwhile
    acknowledged: Callable[[], None] | None = None


@dataclass(slots=True)
class _Job:
    name: Name
    make: Callable[[], list[Effect]]
    subject: Subject
    done: Callable[[bool], None]


def encode_header(name: Name, object_id: int, version: str, size_bytes: int, durable: bool = False) -> bytes:
    body = json.dumps([*name, object_id, version, size_bytes, durable]).encode()
    return sum_of(body).to_bytes(8, "big") + body


def decode_header(data: bytes | None) -> Header | None:
    if not data or sum_of(data[8:]).to_bytes(8, "big") != data[:8]:
        return None
    bucket, key, object_id, version, size_bytes, durable = json.loads(data[8:])
    return (bucket, key), object_id, version, size_bytes, durable


class SimStore:
    """One volume: its disk, its two indexes, and the plans being performed."""

    def __init__(self, schedule: Schedule, disk: SimDisk) -> None:
        self.schedule = schedule
        self.disk = disk
        self.clean: dict[Name, Record] = {}
        self.durable: dict[Name, Record] = {}
        self.next_id = 1
        self.incarnation = 0
        self.sums: dict[str, dict[int, int]] = {}  # by path: what `KeepSums` will write
        self.leases: dict[str, int] = {}
        self.holes: dict[str, set[int]] = {}  # blocks to be punched, by path
        self.pause_us = 200
        self._jobs: dict[Name, deque[_Job]] = {}
        self.unpunched: list[commit.Punch] = []

    # --- looking -----------------------------------------------------------------------------------------------------
    def lookup(self, name: Name) -> Record | None:
        return self.durable.get(name) or self.clean.get(name)

    def records(self) -> list[Record]:
        return [record for name, record in sorted({**self.clean, **self.durable}.items())]

    def read(self, file: File, start: int, end: int) -> bytes:
        return bytes(file.data[start:end])

    def matches(self, record: Record, block: int) -> bool:
        """Whether the block on the disk is what its checksum says."""
        data = self.disk.open(record.path).data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        return self.sums.get(record.path, {}).get(block) == sum_of(data)

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    # --- leases and holes --------------------------------------------------------------------------------------------
    def lease(self, path: str) -> None:
        self.leases[path] = self.leases.get(path, 0) + 1

    def unlease(self, path: str) -> None:
        self.leases[path] -= 1
        if not self.leases[path]:
            del self.leases[path]
            self._punch_what_waited()

    def _punch_what_waited(self) -> None:
        waiting, self.unpunched = self.unpunched, []
        for effect in waiting:
            self._punch(effect)

    def _punch(self, effect: commit.Punch) -> None:
        wanted = self.holes.get(effect.path, set())
        block = effect.start // BLOCK_BYTES
        if block not in wanted or not self.disk.exists(effect.path):
            return
        if effect.path in self.leases:
            self.unpunched.append(effect)
            return
        wanted.discard(block)
        self.disk.punch(effect.path, effect.start, effect.end)

    def write_block_part(self, file: File, path: str, offset: int, data: bytes) -> None:
        """Bytes that land, before their block is whole. `DiskFull` when there is no room."""
        self.holes.get(path, set()).discard(offset // BLOCK_BYTES)
        self.disk.write(file, offset, data)

    # --- plans -------------------------------------------------------------------------------------------------------
    def submit(
        self, name: Name, make: Callable[[], list[Effect]], subject: Subject, done: Callable[[bool], None]
    ) -> None:
        """Perform the plan that `make` returns when its turn comes; `done(False)` when the disk was full."""
        queue = self._jobs.setdefault(name, deque())
        queue.append(_Job(name, make, subject, done))
        if len(queue) == 1:
            self.schedule.after(self.schedule.delay_us(self.pause_us), self._begin, self.incarnation, queue)

    def _begin(self, incarnation: int, queue: deque[_Job]) -> None:
        if incarnation != self.incarnation:
            return
        plan = queue[0].make()
        commit.check_plan(plan)
        self._go_on(incarnation, queue, deque(plan))

    def _go_on(self, incarnation: int, queue: deque[_Job], plan: deque[Effect]) -> None:
        """Perform one effect, then pause."""
        if incarnation != self.incarnation:
            return
        job = queue[0]
        try:
            if plan:
                self.perform(plan.popleft(), job.subject)
        except DiskFull:
            self._end(queue, False)
            return
        if plan:
            self.schedule.after(self.schedule.delay_us(self.pause_us), self._go_on, incarnation, queue, plan)
        else:
            self._end(queue, True)

    def _end(self, queue: deque[_Job], ok: bool) -> None:
        job = queue.popleft()
        if queue:
            self.schedule.after(self.schedule.delay_us(self.pause_us), self._begin, self.incarnation, queue)
        else:
            del self._jobs[job.name]
        job.done(ok)

    def perform(self, effect: Effect, subject: Subject) -> None:
        """One effect, at once."""
        disk = self.disk
        match effect:
            case commit.CreateTemp(path, size_bytes):
                disk.create(path, size_bytes)
                self.sums[path] = {block: self._sum_in(subject, block) for block in range(blocks_of(len(subject.data)))}
            case commit.SetHeader(path, header):
                disk.set_attribute(path, "header", header)
            case commit.WriteBytes(path, offset, length):
                disk.write(disk.open(path), offset, subject.data[offset : offset + length])
            case commit.KeepSums(path, blocks):
                kept = {block: value for block, value in self.sums.get(path, {}).items() if block in blocks}
                if disk.exists(path):
                    disk.set_attribute(path, "sums", json.dumps(kept).encode())
            case commit.SyncFile(path):
                disk.sync_file(path)
            case commit.SyncDir(path):
                disk.sync_directory(path)
            case commit.Rename(source, target):
                disk.rename(source, target)
                self.sums[target] = self.sums.pop(source, {})
            case commit.Unlink(path):
                disk.unlink(path)
                self.holes.pop(path, None)
            case commit.Punch():
                self._punch(effect)
            case commit.PutRecord():
                self._put(effect, subject)
            case commit.RemoveRecord(bucket, key, object_id, durable):
                index = self.durable if durable else self.clean
                if (record := index.get((bucket, key))) and record.object_id == object_id:
                    del index[bucket, key]
            case commit.Acknowledge():
                if subject.acknowledged:
                    subject.acknowledged()
            case commit.Announce():
                pass  # readers here hold leases and no cached descriptors

    def _sum_in(self, subject: Subject, block: int) -> int:
        return sum_of(subject.data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])

    def _put(self, effect: commit.PutRecord, subject: Subject) -> None:
        index = self.durable if effect.durable else self.clean
        name = (effect.bucket, effect.key)
        old = index.get(name)
        same = old is not None and old.object_id == effect.object_id
        index[name] = Record(
            name,
            effect.object_id,
            effect.path,
            subject.version,
            subject.size_bytes,
            old.blocks | subject.landed if old and same and subject.landed is not None else set(effect.blocks),
            {block for block in old.unverified if block in effect.blocks} if old and same else set(),
            None if effect.path else subject.data,
            max(subject.checked_us(), old.checked_us if old and same else 0),
            effect.durable,
        )

    # --- stops -------------------------------------------------------------------------------------------------------
    def stop(self, machine: bool) -> None:
        """The process died, or the whole machine. What was under way is cut where it is."""
        self.incarnation += 1
        self._jobs.clear()
        self.leases.clear()
        self.holes.clear()
        self.unpunched.clear()
        if machine:
            self.disk.crash()
            self.clean.clear()

    def start(self, trusted: bool) -> list[recover.Action]:
        """Judge every file and record, and do what is to be done."""
        headers: dict[str, Header] = {}
        files: list[recover.FileSeen] = []
        self.sums.clear()
        for path in self.disk.list():
            file = self.disk.open(path)
            self.sums[path] = {int(k): v for k, v in json.loads(file.attributes.get("sums", b"{}")).items()}
            header = decode_header(file.attributes.get("header"))
            identity = None
            if header is not None:
                headers[path] = header
                (bucket, key), object_id, _, size_bytes, durable = header
                identity = recover.Identity(bucket, key, object_id, size_bytes, tuple(sorted(self.sums[path])), durable)
                self.next_id = max(self.next_id, object_id + 1)
            kind: Any = "temp" if path.startswith("tmp/") else "data"
            files.append(recover.FileSeen(path, kind, len(file.data), identity))
        indexes = (self.clean, self.durable) if trusted else (self.durable,)
        seen = [
            recover.RecordSeen(*record.name, record.object_id, record.path, record.size_bytes, record.durable)
            for index in indexes
            for record in index.values()
        ]
        actions = recover.recover(files, seen, trusted)
        for action in actions:
            self._apply(action, headers)
        return actions

    def _apply(self, action: recover.Action, headers: dict[str, Header]) -> None:
        match action:
            case recover.Delete(path) | recover.Quarantine(path):
                self.disk.unlink(path)
            case recover.DropRecord(bucket, key, object_id):
                for index in (self.clean, self.durable):
                    if (record := index.get((bucket, key))) and record.object_id == object_id:
                        del index[bucket, key]
            case recover.Rebuild(path, identity):
                name, object_id, version, size_bytes, _ = headers[path]
                blocks = set(identity.blocks)
                self.clean[name] = Record(name, object_id, path, version, size_bytes, blocks, set(blocks))
            case recover.Keep(path, unverified):
                for record in [*self.clean.values(), *self.durable.values()]:
                    if record.path == path and unverified:
                        record.unverified = set(record.blocks)
