"""An engine over a bucket in memory, and a front that speaks the wire: real socket, real store, no HTTP."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.backends.local.memory import MemoryBackend
from forebay.backends.seam import Backend, Body, PartSeen, UploadSeen
from forebay.backends.stack import open_backend
from forebay.backends.wrap.counting import BackendCounters, Counting
from forebay.core.errors import ForebayError, NotSupported, Unavailable, from_wire
from forebay.core.messages import calls, wire
from forebay.core.metrics import Snapshot, encode_snapshot
from forebay.core.types import LOCAL_URL, Bucket, Headers, ListPage, ObjectInfo, RangeSpec
from forebay.node.engine.engine import Engine
from forebay.node.settings import Settings
from tests.patience import PATIENCE_S
from tests.patience import until_async as until  # noqa: F401

MIB = 1 << 20


class FakeClock:
    """The machine's clocks, moved on by hand."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def wall_s(self) -> float:
        import time

        return time.time() + self.ahead_s

    def monotonic_s(self) -> float:
        import time

        return time.monotonic() + self.ahead_s


class Remote:
    """A bucket that can be held up, switched off and watched."""

    scheme = "memory"
    read_only = False

    def __init__(self) -> None:
        self.part_bytes_min = 0  # more than 0: it has uploads
        self.unconditional = False  # it cannot honour `expect`
        self.objects = MemoryBackend("remote")
        self.asked: list[tuple[str, str, int, int]] = []  # verb, key, start, end
        self.down: ForebayError | None = None
        self.open = asyncio.Event()  # bodies stop before each chunk while it is clear
        self.open.set()
        self.free_bytes = 0  # of each body, so much passes a closed gate
        self.ungated: set[str] = set()  # bodies of these keys pass it
        self.cut_after: int | None = None  # bodies break after so many bytes
        self.closed_bodies = 0
        self.lose_answers = 0  # so many writes happen, and their answers are lost
        self.writable = asyncio.Event()  # writes stop before they happen while it is clear
        self.writable.set()
        self.cancelled = 0
        self.refuses: ForebayError | None = None  # what writes are answered, and they do not happen
        self.answers: dict[str, asyncio.Event] = {}  # answers to these verbs come when it is set; the write happens
        self.unheard: Counter[str] = Counter()  # how many of them are held so
        self.may_head = asyncio.Event()  # heads stop before they look while it is clear
        self.may_head.set()
        self.may_fetch = asyncio.Event()  # and fetches
        self.may_fetch.set()
        self.hung_check: asyncio.Future[None] | None = None  # the next check waits for it, and fails as it does

    def place(self, key: str, data: bytes) -> ObjectInfo:
        return self.objects.place(key, data, (("content-type", "text/x-story"),))

    def count(self, verb: str) -> int:
        return sum(entry[0] == verb for entry in self.asked)

    def fetched_bytes(self) -> int:
        return sum(end - start for verb, _, start, end in self.asked if verb == "fetch")

    def _may(self) -> None:
        if self.down is not None:
            raise self.down

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> Any:
        await asyncio.sleep(0)
        await self.may_fetch.wait()
        self._may()
        try:
            fetch = await self.objects.fetch(key, range, version=version)
        except ForebayError:
            self.asked.append(("refused", key, 0, 0))
            raise
        self.asked.append(("fetch", key, fetch.start, fetch.end))
        return _Body(self, fetch)

    async def head(self, key: str) -> ObjectInfo:
        self._may()
        self.asked.append(("head", key, 0, 0))
        await self.may_head.wait()
        return await self.objects.head(key)

    async def check(self, key: str, version: str) -> ObjectInfo | None:
        await asyncio.sleep(0.001)
        self._may()
        self.asked.append(("check", key, 0, 0))
        hung, self.hung_check = self.hung_check, None
        if hung is not None:
            await hung
        return await self.objects.check(key, version)

    async def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        self._may()
        self.asked.append(("list", prefix, 0, 0))
        return await self.objects.list_page(prefix, delimiter, start_after, limit)

    async def _write(self, verb: str, key: str, size: int, expect: str | None, work: Awaitable[Any]) -> Any:
        """One write: held up, refused, or done with its answer lost, as the test wants it."""
        self.asked.append((verb, key, 0, size))
        try:
            self._may()
            if expect is not None and self.unconditional:
                raise NotSupported("this backend knows no conditions")
            await self.writable.wait()
            self._may()
            if self.refuses is not None:
                raise self.refuses
        except BaseException as error:
            self.cancelled += isinstance(error, asyncio.CancelledError)
            work.close()  # type: ignore[attr-defined]
            raise
        try:
            result = await work
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if verb in self.answers:
            self.unheard[verb] += 1
            await self.answers[verb].wait()
            self.unheard[verb] -= 1
        if self.lose_answers:
            self.lose_answers -= 1
            raise Unavailable("the answer was lost: try again")
        return result

    async def put(
        self, key: str, body: Body, *, headers: Headers = (), expect: str | None = None, tags: str = ""
    ) -> ObjectInfo:
        work = self.objects.put(key, body, headers=headers, expect=expect, tags=tags)
        return await self._write("put", key, body.size_bytes, expect, work)

    async def delete(self, key: str, *, expect: str | None = None) -> None:
        await self._write("delete", key, 0, expect, self.objects.delete(key, expect=expect))

    async def copy(
        self, source_key: str, key: str, *, source_version: str = "", headers: Headers | None = None
    ) -> ObjectInfo:
        work = self.objects.copy(source_key, key, source_version=source_version, headers=headers)
        return await self._write("copy", key, 0, None, work)

    async def read_tags(self, key: str) -> str:
        self._may()
        self.asked.append(("read_tags", key, 0, 0))
        return await self.objects.read_tags(key)

    async def write_tags(self, key: str, tags: str) -> None:
        await self._write("write_tags", key, 0, None, self.objects.write_tags(key, tags))

    async def begin_upload(self, key: str, *, headers: Headers = (), tags: str = "") -> str:
        return await self._write("begin", key, 0, None, self.objects.begin_upload(key, headers=headers, tags=tags))

    async def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        work = self.objects.put_part(key, upload_id, number, body)
        return await self._write("part", key, body.size_bytes, None, work)

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[tuple[int, str]], *, expect: str | None = None
    ) -> ObjectInfo:
        work = self.objects.complete_upload(key, upload_id, parts, expect=expect)
        return await self._write("complete", key, 0, expect, work)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        self.asked.append(("abort", key, 0, 0))
        await self.objects.abort_upload(key, upload_id)

    async def list_parts(self, key: str, upload_id: str) -> list[PartSeen]:
        return await self.objects.list_parts(key, upload_id)

    async def list_uploads(self, prefix: str) -> list[UploadSeen]:
        return await self.objects.list_uploads(prefix)

    async def probe(self) -> None:
        self._may()

    async def aclose(self) -> None:
        pass


class _Body:
    def __init__(self, remote: Remote, inner: Any) -> None:
        self.info, self.start, self.end = inner.info, inner.start, inner.end
        self._remote, self._inner = remote, inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        sent = 0
        async for chunk in self._inner:
            if sent >= self._remote.free_bytes and self.info.key not in self._remote.ungated:
                await self._remote.open.wait()
            if self._remote.cut_after is not None and sent >= self._remote.cut_after:
                raise Unavailable("the connection broke: try again")
            sent += len(chunk)
            yield chunk

    async def aclose(self) -> None:
        self._remote.closed_bodies += 1


def _read(landed: wire.Landed) -> bytes:
    fd = os.open(landed.path, os.O_RDONLY)
    try:
        return os.pread(fd, landed.end - landed.start, landed.offset)
    finally:
        os.close(fd)


class ReadSeen:
    """One read as a front sees it."""

    def __init__(self, front: Front, number: int) -> None:
        self.front, self.number = front, number
        self.opened: wire.Opened | None = None
        self.data = bytearray()
        self.error: ForebayError | None = None
        self.messages = 0
        self.changed = asyncio.Event()
        self.takes = True  # whether the client reads what it is told of
        self.stopped: list[Any] | None = None  # what came while the front stood still

    def stand_still(self) -> None:
        """Look at no message until `go_on`."""
        self.stopped = []

    def go_on(self) -> None:
        stopped, self.stopped = self.stopped or [], None
        for message in stopped:
            self.take(message)

    def take(self, message: Any) -> None:
        if self.stopped is not None:
            self.stopped.append(message)
            self.changed.set()
            return
        self.messages += 1
        if isinstance(message, wire.Opened):
            assert self.opened is None, "opened once"
            self.opened = message
            if message.body is not None:
                self.data += message.body
        elif isinstance(message, wire.Landed):
            assert self.opened is not None
            if self.error is not None:
                return  # it was on its way
            assert message.start == self.opened.start + len(self.data), "contiguous"
            try:
                piece = message.body if message.body is not None else _read(message)
            except FileNotFoundError:
                self.error = Unavailable("the file that the bytes landed in is gone: read again")  # a front asks anew
                self.changed.set()
                return
            assert len(piece) == message.end - message.start
            self.data += piece
            if self.takes:
                self.front.post(wire.Consumed(self.number, message.end))
        elif isinstance(message, wire.Withdrawn):
            self.error = Unavailable("what was told is withdrawn: read again")  # a front asks anew
        else:
            assert self.error is None, "failed once"
            self.error = from_wire(message.error)
        self.changed.set()

    async def until(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def whole(self) -> bytes:
        """Every byte of the range; raises what failed. Closes the read."""
        try:
            await self.until(
                lambda: (
                    self.error is not None
                    or (self.opened is not None and len(self.data) == self.opened.end - self.opened.start)
                )
            )
            if self.error is not None:
                raise self.error
            return bytes(self.data)
        finally:
            self.close()

    def close(self) -> None:
        self.front.post(wire.CloseRead(self.number))


class Front:
    """A front without HTTP."""

    def __init__(self) -> None:
        self.reads: dict[int, ReadSeen] = {}
        self.calls: dict[int, asyncio.Future[bytes]] = {}
        self.dropped: list[int] = []
        self.welcomes: list[wire.Welcome] = []
        self.welcomed = asyncio.Event()
        self.listens = asyncio.Event()  # cleared while what the engine says is left in the socket
        self.listens.set()
        self._number = 0
        self._frames = wire.Frames()

    async def connect(self, settings: Settings, number: int = 1) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(str(settings.engine_socket))
        self.post(wire.Hello(number, os.getpid()))
        self.task = asyncio.create_task(self._listen())
        async with asyncio.timeout(PATIENCE_S):
            await self.welcomed.wait()

    async def _listen(self) -> None:
        while data := await self._reader.read(1 << 16):
            await self.listens.wait()
            for message in self._frames.feed(data):
                if isinstance(message, wire.Opened | wire.Landed | wire.Withdrawn):
                    self.reads[message.read].take(message)
                elif isinstance(message, wire.Answer):
                    self.calls.pop(message.call).set_result(message.body)
                elif isinstance(message, wire.Failed):
                    if message.number in self.calls:
                        self.calls.pop(message.number).set_exception(from_wire(message.error))
                    else:
                        self.reads[message.number].take(message)
                elif isinstance(message, wire.Welcome):
                    self.welcomes.append(message)
                    self.welcomed.set()
                elif isinstance(message, wire.Dropped):
                    self.dropped += message.object_ids
                elif isinstance(message, wire.Report):
                    self.post(wire.Reported(message.report, 1, encode_snapshot(Snapshot())))

    def post(self, message: wire.Message) -> None:
        self._writer.write(wire.encode(message))

    def open(self, key: str, range: RangeSpec | None = None, bucket: str = "remote", **more: Any) -> ReadSeen:
        self._number += 1
        read = self.reads[self._number] = ReadSeen(self, self._number)
        self.post(wire.OpenRead(self._number, bucket, key, range, **more))
        return read

    async def get(self, key: str, range: RangeSpec | None = None, **more: Any) -> bytes:
        return await self.open(key, range, **more).whole()

    async def call(self, verb: str, arguments: Any = None) -> Any:
        if isinstance(arguments, Bucket) and verb == "bucket_put":
            arguments = calls.BucketPutCall(arguments, free=True)
        self._number += 1
        future = self.calls[self._number] = asyncio.get_running_loop().create_future()
        body = calls.encode_call(verb, calls.Nothing() if arguments is None else arguments)
        self.post(wire.Call(self._number, verb, body))
        async with asyncio.timeout(PATIENCE_S):
            return calls.decode_answer(verb, await future)

    async def job(self, verb: str, arguments: calls.JobCall) -> calls.JobState:
        """Start a job and wait for its end."""
        return await self.ended(await self.call(verb, arguments))

    async def ended(self, state: calls.JobState) -> calls.JobState:
        """Wait for a job's end."""
        for _ in range(4000):
            if state.state != "running":
                return state
            await asyncio.sleep(0.005)
            state = await self.call("job", calls.JobNamed(state.job))
        raise AssertionError(f"the job does not end: {state}")

    def post_taken(self, read: ReadSeen) -> None:
        """The read's client took all it was told of."""
        assert read.opened is not None
        self.post(wire.Consumed(read.number, read.opened.start + len(read.data)))

    def vanish(self) -> None:
        self._writer.transport.abort()

    async def aclose(self) -> None:
        self._writer.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Rig:
    """An engine, its bucket and a front."""

    def __init__(self, dir: Path, remote: Remote, clock: FakeClock, **settings: Any) -> None:
        self.remote, self.clock = remote, clock
        self.settings = Settings(dir=str(dir), auto_buckets=False, scrub_bytes_s=0, **settings)
        self.front = Front()

    async def start(self, bucket: Bucket | None = None) -> None:
        self.engine = Engine(self.settings, opener=self._opener, clock=self.clock)
        await self.engine.start()
        if bucket is not None:
            await self.engine.buckets.put(bucket)
        await self.front.connect(self.settings)

    def _opener(self, bucket: Bucket, counters: BackendCounters) -> Backend:
        if bucket.url == LOCAL_URL:
            return open_backend(bucket, clock=self.clock, counters=counters)
        return Counting(self.remote, counters, self.clock)

    async def stop(self, *, clean: bool = True) -> None:
        await self.front.aclose()
        await self.engine.stop(clean=clean)

    async def again(self, *, clean: bool = True) -> None:
        """Stop and start, as after an upgrade."""
        await self.stop(clean=clean)
        self.front = Front()
        await self.start()

    async def idle(self) -> None:
        """Wait until nothing is read or fetched."""
        cold = self.engine.cold
        for _ in range(5000):
            if not (cold.all_flights or cold.reads):
                return
            await asyncio.sleep(0.002)
        raise AssertionError(f"{cold.reads} reads and flights {[f.machine for f in cold.all_flights]} do not end")


@asynccontextmanager
async def rig(
    dir: Path, freshness_s: float = 60.0, pinned: tuple[str, ...] = (), quota_bytes: int | None = None, **settings: Any
) -> AsyncIterator[Rig]:
    """A running rig with a bucket `remote`."""
    made = Rig(dir, Remote(), FakeClock(), **settings)
    bucket = Bucket("remote", "memory://remote", freshness_s=freshness_s, pinned=pinned, quota_bytes=quota_bytes)
    await made.start(bucket)
    try:
        yield made
    finally:
        await made.stop()


Story = Callable[..., Coroutine[Any, Any, None]]


@pytest.fixture
def rigged(tmp_path: Path) -> Callable[..., None]:
    """`rigged(story, **settings)` runs `async def story(rig)` on a fresh engine, and looks for what it left behind."""

    def run(story: Callable[[Rig], Awaitable[None]], **settings: Any) -> None:
        async def main() -> None:
            async with rig(tmp_path, **settings) as made:
                await story(made)
                await made.idle()
                assert made.engine.cold.pass_bytes == 0
                assert not made.engine.cold.openings.under_way

        before = len(os.listdir("/proc/self/fd"))
        asyncio.run(main(), debug=False)
        left = [str(path.resolve()) for path in Path("/proc/self/fd").iterdir() if path.exists()]
        assert len(os.listdir("/proc/self/fd")) <= before, f"descriptors were leaked: {left}"

    return run


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes that differ at every place that matters: a wrong offset or a mixed version shows."""
    import random

    unit = random.Random(seed).randbytes(65_521)  # a prime, so that no block boundary repeats
    return (unit * (size // len(unit) + 1))[:size]
