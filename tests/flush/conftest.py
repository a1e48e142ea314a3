"""A flusher between a store that is a dictionary and a bucket in memory: writers, crashes and strangers by hand."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from forebay.backends.local.memory import MemoryBackend
from forebay.backends.seam import Body
from forebay.core import limits
from forebay.core.errors import ForebayError, NotFound, NotSupported, Precondition, Unavailable
from forebay.core.record import Record, State
from forebay.core.types import Bucket, Headers, ObjectInfo
from forebay.node.engine.flush.flusher import Flusher
from forebay.node.store.disk.notes import Note, Owed, digest_of, succeeding
from forebay.node.store.writer.puts import Delete
from forebay.ports.chance import Seeded
from tests.patience import until_async as until


class Clock:
    """The machine's clocks, moved on by hand."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def wall_s(self) -> float:
        return time.time() + self.ahead_s

    def monotonic_s(self) -> float:
        return time.monotonic() + self.ahead_s


class Remote(MemoryBackend):
    """A bucket that can be held up, told to fail or to lose its answer, and that remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__("remote")
        self.asked: list[tuple[str, str]] = []
        self.open = asyncio.Event()  # writes wait while it is clear
        self.open.set()
        self.hold_from = ""  # the verb whose next write clears `open`
        self.fail: deque[ForebayError] = deque()  # the next writes
        self.lose: set[str] = set()  # verbs: do it once, and say that it failed
        self.hang = 0  # so many of the next writes: say that they failed, and do them when they `land`
        self.hanging: list[Callable[[], Coroutine[Any, Any, Any]]] = []
        self.away = False
        self.knows_conditions = True
        self.knows_tags = True
        self.busy = self.busiest = 0

    def count(self, verb: str) -> int:
        return sum(each[0] == verb for each in self.asked)

    async def _write(self, verb: str, key: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        self.asked.append((verb, key))
        self.busy += 1
        if verb == self.hold_from:
            self.hold_from = ""
            self.open.clear()
        self.busiest = max(self.busy, self.busiest)
        try:
            await self.open.wait()
            await asyncio.sleep(0)
            if self.away:
                raise Unavailable("the connection is refused: try again")
            if self.hang:
                self.hang -= 1
                self.hanging.append(work)
                raise Unavailable("no answer in time: try again")
            if self.fail:
                raise self.fail.popleft()
            result = await work()
            if verb in self.lose:
                self.lose.discard(verb)
                raise Unavailable("the connection broke before the answer: try again")
            return result
        finally:
            self.busy -= 1

    async def land(self) -> list[bool]:
        """What hung arrives now, in its order; which of it was taken."""
        taken = []
        while self.hanging:
            try:
                await self.hanging.pop(0)()
                taken.append(True)
            except Precondition:
                taken.append(False)
        return taken

    async def head(self, key: str) -> ObjectInfo:
        if self.away:
            raise Unavailable("the connection is refused: try again")
        return await MemoryBackend.head(self, key)

    def _refuse(self, expect: str | None, tags: str = "") -> None:
        if expect is not None and not self.knows_conditions:
            raise NotSupported("this service knows no conditions on writes: write without one")
        if tags and not self.knows_tags:
            raise NotSupported("this service has no tags: leave them out")

    async def put(
        self, key: str, body: Body, *, headers: Headers = (), expect: str | None = None, tags: str = ""
    ) -> ObjectInfo:
        async def work() -> ObjectInfo:
            self._refuse(expect, tags)
            return await MemoryBackend.put(self, key, body, headers=headers, expect=expect, tags=tags)

        return await self._write("put", key, work)

    async def delete(self, key: str, *, expect: str | None = None) -> None:
        async def work() -> None:
            self._refuse(expect)
            await MemoryBackend.delete(self, key, expect=expect)

        await self._write("delete", key, work)

    async def begin_upload(self, key: str, *, headers: Headers = (), tags: str = "") -> str:
        async def work() -> str:
            self._refuse(None, tags)
            return await MemoryBackend.begin_upload(self, key, headers=headers, tags=tags)

        return await self._write("begin", key, work)

    async def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        return await self._write("part", key, lambda: MemoryBackend.put_part(self, key, upload_id, number, body))

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[tuple[int, str]], *, expect: str | None = None
    ) -> ObjectInfo:
        async def work() -> ObjectInfo:
            self._refuse(expect)
            return await MemoryBackend.complete_upload(self, key, upload_id, parts, expect=expect)

        return await self._write("complete", key, work)

    def data(self, key: str) -> bytes | None:
        found = self._objects.get(key)
        return None if found is None else found[1]

    def names(self) -> list[str]:
        return sorted(self._objects)


class Served:
    def __init__(self, bucket: Bucket, backend: Any) -> None:
        self.bucket, self.backend = bucket, backend


class Shelf:
    """Records, bytes and notes, as the store keeps them; they survive a crash of the flusher."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.records: dict[tuple[str, str], Record] = {}
        self.sums: dict[int, list[int]] = {}
        self.notes: dict[tuple[str, str], Owed] = {}

    def check_present(self, bucket: str, key: str) -> None:
        """No volume is missing."""

    def check_lost(self, bucket: str, key: str) -> None:
        """Nothing is lost."""

    def examine(self, bucket: str, key: str, object_id: int) -> Record | None:
        return self.lookup(bucket, key)

    def lookup(self, bucket: str, key: str) -> Record | None:
        return self.records.get((bucket, key))

    def data_path(self, record: Record) -> str:
        return "" if record.inline is not None else str(self.directory / str(record.object_id))

    def check_blocks(self, record: Record, bucket: str, key: str, blocks: Sequence[int]) -> list[int]:
        bad = []
        with open(self.data_path(record), "rb") as file:
            for block in blocks:
                file.seek(block * record.block_bytes)
                if xxhash.xxh3_64_intdigest(file.read(record.block_bytes)) != self.sums[record.object_id][block]:
                    bad.append(block)
        return bad

    def mark_clean(
        self, bucket: str, key: str, object_id: int, *, version: str, checked_s: float, keeping: Headers = ()
    ) -> Record | None:
        owed = self.notes.get((bucket, key))
        if owed is None or owed.note.object_id != object_id:
            return None
        del self.notes[bucket, key]
        record = self.records.get((bucket, key))
        if object_id == 0 or record is None:
            return None
        clean = msgspec.structs.replace(record, state=State.CLEAN, version=version, checked_s=checked_s)
        self.records[bucket, key] = clean
        return clean

    def volume_at(self, bucket: str, key: str) -> None:
        return None

    def write_notes(self, owed: Sequence[Owed]) -> None:
        for each in owed:
            there = self.notes.get((each.bucket, each.key))
            if there is not None and there.note.seq == each.note.seq:
                self.notes[each.bucket, each.key] = each

    def owed(self) -> Iterator[Owed]:
        return iter(list(self.notes.values()))


class Node:
    """A flusher and those around it. `write` and `delete` are what an acknowledged write does."""

    def __init__(self, directory: Path, remote: Any, **settings: Any) -> None:
        self.shelf = Shelf(directory)
        self.remote = remote
        self.clock = Clock()
        self.bucket = Bucket("b", "memory://remote", write="back", **settings)
        self.seq = 0
        self.locks: dict[str, asyncio.Lock] = {}
        self.cleaned: list[str] = []
        self.left: list[str] = []  # keys of uploads whose ids nobody heard
        self.capacity_bytes = 1 << 40
        self.workers = ThreadPoolExecutor(2)
        self.boot()

    def boot(self) -> None:
        """A flusher that begins with what the store has."""
        self.flusher = Flusher(
            self.shelf,
            self,  # type: ignore[arg-type]
            self.clock,
            Seeded(1),
            self.workers,
            lock=self.lock,
            commit=self.commit,
            flush_soon=lambda: None,
            node_id="node1",
            capacity_bytes=lambda: self.capacity_bytes,
            cleaned=lambda bucket, key, record: self.cleaned.append(key),
        )
        for owed in self.shelf.owed():
            self.flusher.take_up(owed)

    async def crash(self) -> None:
        """End everything at once, wherever it is, and start again with what is on the shelf."""
        await self.flusher.aclose(flush=False)
        self.locks.clear()
        self.boot()

    async def get(self, name: str) -> Any:
        if name != "b":
            raise NotFound("there is no such bucket", code="NoSuchBucket")
        return Served(self.bucket, self.remote)

    async def leave_uploads(self, served: Any, key: str) -> None:
        self.left.append(key)

    @asynccontextmanager
    async def lock(self, bucket: str, key: str) -> AsyncIterator[None]:
        async with self.locks.setdefault(key, asyncio.Lock()):
            yield

    async def commit(self, change: Delete) -> None:
        self._forget_bytes(change.key)
        self.shelf.notes.pop((change.bucket, change.key), None)
        self.flusher.forget(change.bucket, change.key)  # as the writer's books do when a change without a note shows

    def _forget_bytes(self, key: str) -> None:
        record = self.shelf.records.pop(("b", key), None)
        if record is not None and record.inline is None:
            (self.shelf.directory / str(record.object_id)).unlink()

    async def write(self, key: str, data: bytes, headers: Headers = (), *, tell: bool = True, **about: Any) -> None:
        """A write that is acknowledged. Without `tell` the node is killed right after: the flusher never hears."""
        async with self.lock("b", key):
            self.seq += 1
            before = self.shelf.lookup("b", key)
            based_on = before.version if before is not None and not before.state & State.DIRTY else ""
            self._forget_bytes(key)
            inline = data if len(data) <= limits.INLINE_BYTES_MAX else None
            if inline is None:
                (self.shelf.directory / str(self.seq)).write_bytes(data)
            block = limits.BLOCK_BYTES
            sums = [xxhash.xxh3_64_intdigest(data[at : at + block]) for at in range(0, len(data), block)]
            self.shelf.sums[self.seq] = sums
            self.shelf.records["b", key] = Record(
                self.seq, len(data), f"own-{self.seq}", "etag", 0.0, 0.0, b"", True, State.DIRTY, inline=inline
            )
            based_on = about.pop("based_on", based_on)
            note = Note(self.seq, self.clock.wall_s(), len(data), self.seq, based_on, headers, **about)
            note = msgspec.structs.replace(note, digest=digest_of(len(data), sums=sums))
            self._note(key, note, tell)

    async def fail(self, key: str) -> None:
        """The key's flush is begun at once, however long it should wait, and fails."""
        before = self.flusher._of["b"].counts.failures.total()

        def failed() -> bool:
            self.clock.ahead_s += 60.0
            self.flusher.ask("b", key)
            return self.flusher._of["b"].counts.failures.total() > before

        await until(failed, "a failure")

    async def delete(self, key: str, *, tell: bool = True) -> None:
        async with self.lock("b", key):
            self.seq += 1
            before = self.shelf.lookup("b", key)
            based_on = before.version if before is not None and not before.state & State.DIRTY else ""
            self._forget_bytes(key)
            self._note(key, Note(self.seq, self.clock.wall_s(), 0, 0, based_on), tell)

    def _note(self, key: str, note: Note, tell: bool) -> None:
        there = self.flusher.find("b", key)
        if not tell and ("b", key) in self.shelf.notes:
            there = self.shelf.notes["b", key].note
        if there is None:  # as a writer begins a note
            note = msgspec.structs.replace(note, **self.flusher.sent("b", key)._asdict())
        owed = Owed("b", key, succeeding(note, there), True)
        self.shelf.notes["b", key] = owed
        if tell:
            self.flusher.add(owed)

    @property
    def conflicts(self) -> Counter[str]:
        return self.flusher._of["b"].counts.conflicts if "b" in self.flusher._of else Counter()

    def owes(self) -> list[str]:
        return [key for key, _ in self.flusher.window("b", "", "", 1000)]

    async def settle(self) -> None:
        """All is flushed."""
        async with asyncio.timeout(60):
            await self.flusher.flush("b")
        assert self.owes() == []
        assert not self.shelf.notes
        await until(lambda: not self.flusher.totals("b").flushing)
        assert self.flusher.totals("b")[:4] == (0, 0, None, 0)


@pytest.fixture
def story(tmp_path: Path) -> Callable[..., None]:
    """Run a coroutine function with a fresh node; settings go to its bucket."""

    def run(tell: Callable[[Node], Coroutine[Any, Any, None]], remote: Any = None, **settings: Any) -> None:
        async def all_of_it() -> None:
            node = Node(tmp_path, remote() if remote is not None else Remote(), **settings)
            try:
                async with asyncio.timeout(120):
                    await tell(node)
            finally:
                await node.flusher.aclose(flush=False)
                node.workers.shutdown()
            assert len(asyncio.all_tasks()) == 1, "something still runs"

        asyncio.run(all_of_it())

    return run
