"""An engine made of a dictionary: it speaks messages/wire.py over a real Unix socket and does what a test tells it to.

`serve` runs it together with a front on one uvloop loop in a thread of its own; tests use plain blocking sockets.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
import xxhash

from forebay.core import limits
from forebay.core.errors import ForebayError, NotFound, Precondition
from forebay.core.messages import calls, wire
from forebay.core.metrics import Snapshot, decode_snapshot, merge
from forebay.core.record import Record, build_head
from forebay.core.types import Bucket, ListEntry, ListPage, ObjectInfo
from forebay.node.front.front import Front
from forebay.node.front.http.server import Timeouts, listen
from forebay.node.settings import Settings
from forebay.node.store.disk.files import file_name
from forebay.node.store.writer.writer import Store
from forebay.ports import clock
from tests.patience import PATIENCE_S

WAIT_S = PATIENCE_S


def info(key: str, data_bytes: int, version: str = "v1", **headers: str) -> ObjectInfo:
    return ObjectInfo(
        key,
        data_bytes,
        version,
        f"etag-{version}",
        1_700_000_000.0,
        tuple(headers.items()) or (("content-type", "a/b"),),
    )


@dataclass
class Cold:
    """An object that only the backend has. `pieces` are how it lands; `hold_at` waits for `release` before the piece
    that reaches it; `fail_at` fails there; `whole` sends it inside `Opened`; `memory` lands in a memfd; `silent` says
    nothing at all; of the next `withdrawn` reads, what was told up to `hold_at` is taken back there. From `spoil_at`
    on, the file of the next `spoiled` reads ends, or is `gone` from the beginning. `overwritten`: whoever comes back
    for the same version finds another, so many times."""

    data: bytes
    version: str = "v1"
    piece_bytes: int = 100_000
    hold_at: int | None = None
    fail_at: int | None = None
    whole: bool = False
    memory: bool = False
    error: ForebayError | None = None
    silent: bool = False
    withdrawn: int = 0
    spoiled: int = 0
    spoil_at: int = 0
    gone: bool = False
    overwritten: int = 0
    release: threading.Event = field(default_factory=threading.Event)


class FakeEngine:
    def __init__(self, path: Path, store: Store, buckets: list[Bucket]) -> None:
        self.path = path
        self.store = store
        self.buckets = buckets
        self.identities = b""
        self.cold: dict[tuple[str, str], Cold] = {}
        self.seen: list[wire.Message] = []
        self.reports: list[Snapshot] = []
        self.answers: dict[str, Any] = {}
        self.mute: set[str] = set()  # calls that are never answered
        self.calls: list[tuple[str, Any]] = []
        self.transports: list[asyncio.Transport] = []
        self.memory: list[int] = []
        self.volumes_said: list[wire.VolumeAt] | None = None
        self._server: asyncio.Server | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    # --- life ---
    async def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Talk(self), str(self.path))

    async def stop(self) -> None:
        """Die: every connection breaks, nobody listens."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks.values()):
            task.cancel()
        for transport in self.transports:
            transport.abort()
        self.transports.clear()

    def welcome(self) -> wire.Welcome:
        volumes = self.store.volumes() if self.volumes_said is None else self.volumes_said
        return wire.Welcome("n1", volumes, self.buckets, self.identities)

    def say(self, message: wire.Message) -> None:
        for transport in self.transports:
            transport.write(wire.encode(message))

    # --- answers ---
    def take(self, talk: _Talk, message: wire.Message) -> None:
        self.seen.append(message)
        if isinstance(message, wire.Hello):
            talk.say(self.welcome())
        elif isinstance(message, wire.OpenRead):
            task = asyncio.ensure_future(self._read(talk, message))
            self._tasks[message.read] = task
            task.add_done_callback(lambda _: self._tasks.pop(message.read, None))
        elif isinstance(message, wire.CloseRead):
            open_task = self._tasks.get(message.read)
            if open_task is not None:
                open_task.cancel()
        elif isinstance(message, wire.Call):
            self._answer(talk, message)
        elif isinstance(message, wire.Reported):
            self.reports.append(decode_snapshot(message.body))

    def _answer(self, talk: _Talk, message: wire.Call) -> None:
        arguments = calls.decode_call(message.verb, message.body)
        self.calls.append((message.verb, arguments))
        if message.verb in self.mute:
            return
        answer = self.answers.get(message.verb)
        if callable(answer):
            try:
                answer = answer(arguments)
            except ForebayError as error:
                answer = error
        if answer is None:
            try:
                answer = self._write(message.verb, arguments)
            except ForebayError as error:
                answer = error
        if message.verb == "buckets" and answer is None:
            answer = self.buckets
        if message.verb == "list" and answer is None:
            answer = ListPage([ListEntry("from-backend", 1, "e", 0.0)], [])
        if message.verb == "list":
            try:
                self._find(arguments.bucket)
            except NotFound as error:
                answer = error
        if answer is None:
            return  # never answers
        if isinstance(answer, ForebayError):
            talk.say(wire.Failed(message.call, answer.to_wire()))
        else:
            talk.say(wire.Answer(message.call, calls.encode_answer(answer)))

    def _write(self, verb: str, arguments: Any) -> Any:
        """Writes land among `cold`, so that a read then sees them. None for other calls."""
        if verb in ("put", "delete"):
            self._find(arguments.bucket)
        if verb == "put_open":
            return calls.PutOpened(0)
        if verb == "put":
            data = arguments.body
            if data is None:
                data = Path(arguments.path).read_bytes()
                os.unlink(arguments.path)
            assert len(data) == arguments.size_bytes
            version = f"w{len(self.calls)}"
            self.cold[arguments.bucket, arguments.key] = Cold(data, version)
            return calls.Written(f"etag-{version}", version, len(data), 1_700_000_000.0)
        if verb == "delete":
            self.cold.pop((arguments.bucket, arguments.key), None)
            return calls.Nothing()
        if verb == "copy":
            source = self.cold.get((arguments.source_bucket, arguments.source_key))
            if source is None:
                return NotFound("there is no such object", code="NoSuchKey")
            version = f"w{len(self.calls)}"
            self.cold[arguments.bucket, arguments.key] = Cold(source.data, version)
            return calls.Written(f"etag-{version}", version, len(source.data), 1_700_000_000.0)
        if verb == "stat":
            return NotFound("there is no such object", code="NoSuchKey")
        return None

    def _find(self, bucket: str) -> None:
        if all(bucket != known.name for known in self.buckets):
            raise NotFound(f"there is no bucket {bucket!r}", code="NoSuchBucket")

    async def _read(self, talk: _Talk, asked: wire.OpenRead) -> None:
        cold = self.cold.get((asked.bucket, asked.key))
        try:
            if cold is None:
                self._find(asked.bucket)
                raise NotFound(f"{asked.key} does not exist", code="NoSuchKey")
            if cold.silent:
                return
            if cold.error is not None:
                raise cold.error
            if asked.version and cold.overwritten:
                cold.overwritten -= 1
                cold.version += "'"
            if asked.version and asked.version != cold.version:
                raise Precondition("the object changed")
            start, end = (0, len(cold.data)) if asked.range is None else asked.range.resolve(len(cold.data))
            object_info = info(asked.key, len(cold.data), cold.version)
            record = Record(
                77, len(cold.data), cold.version, object_info.etag, object_info.modified_s, clock.wall_s(),
                build_head(object_info), complete=False,
            )  # fmt: skip
            body = cold.data[start:end] if cold.whole and not asked.head_only else None
            talk.say(wire.Opened(asked.read, record, start, end, False, body))
            if body is None and not asked.head_only:
                await self._land(talk, asked, cold, start, end)
        except ForebayError as error:
            talk.say(wire.Failed(asked.read, error.to_wire()))

    async def _land(self, talk: _Talk, asked: wire.OpenRead, cold: Cold, start: int, end: int) -> None:
        path = self.path.parent / f"landing-{asked.read}"
        position = start
        spoil, cold.spoiled = cold.spoiled > 0, max(0, cold.spoiled - 1)
        while position < end:
            piece_end = min(end, position + cold.piece_bytes)
            if cold.hold_at is not None and piece_end > cold.hold_at:
                await _until(cold.release.is_set)
                if cold.withdrawn:
                    cold.withdrawn -= 1
                    talk.say(wire.Withdrawn(asked.read))
                    return
            if cold.fail_at is not None and piece_end > cold.fail_at:
                raise ForebayError("the backend broke")
            piece = cold.data[position:piece_end]
            if cold.memory:
                for fd in self.memory:
                    os.close(fd)  # so that the next one has the same number
                fd = os.memfd_create("landing")
                self.memory = [fd]
                os.pwrite(fd, piece, 0)
                talk.say(wire.Landed(asked.read, position, piece_end, f"/proc/{os.getpid()}/fd/{fd}", 0))
                await _until(lambda end=piece_end: self._consumed(asked.read) >= end)  # type: ignore[misc]
            else:
                with open(path, "r+b" if path.exists() else "w+b") as file:
                    file.seek(position)
                    file.write(piece[: max(0, cold.spoil_at - position)] if spoil else piece)
                if spoil and cold.gone:
                    path.unlink()
                talk.say(wire.Landed(asked.read, position, piece_end, str(path), position))
            position = piece_end

    def _consumed(self, read: int) -> int:
        return max((m.position for m in self.seen if isinstance(m, wire.Consumed) and m.read == read), default=0)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for is set by a test's thread
        await asyncio.sleep(0.002)


class _Talk(asyncio.Protocol):
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._frames = wire.Frames()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._engine.transports.append(transport)

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._engine.take(self, message)

    def connection_lost(self, error: Exception | None) -> None:
        if self.transport in self._engine.transports:
            self._engine.transports.remove(self.transport)

    def say(self, message: wire.Message) -> None:
        self.transport.write(wire.encode(message))


class Node:
    """A front with its fake engine, both running. `run` executes a coroutine function on their loop."""

    def __init__(self, dir: Path, settings: Settings, timeouts: Timeouts, grace_s: float) -> None:
        self.dir = dir
        self.store = Store.open([dir / "volumes" / "v0"])
        self.buckets = [Bucket("b", "memory://", freshness_s=1e18), Bucket("strict", "memory://", freshness_s=0.0)]
        self.engine = FakeEngine(settings.engine_socket, self.store, self.buckets)
        self._settings, self._timeouts, self._grace_s = settings, timeouts, grace_s
        self.front: Front
        self._thread = threading.Thread(target=lambda: uvloop.run(self._main()), daemon=True)
        self._ready = threading.Event()
        self._failure: BaseException | None = None

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            await self.engine.start()
            self.front = Front(self._settings, 3, timeouts=self._timeouts, grace_s=self._grace_s)
            await self.front.start(listen("127.0.0.1", 0))
            self.port = self.front.port
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._ready.set()
        await self._stop.wait()
        await self.front.stop(0.5)
        await self.engine.stop()

    def __enter__(self) -> Node:
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        for fd in self.engine.memory:
            os.close(fd)
        self.store.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def call(self, work: Callable[[], Any]) -> Any:
        async def wrapped() -> Any:
            return work()

        return self.run(wrapped())

    def put(
        self, key: str, data: bytes, *, bucket: str = "b", version: str = "v1", blocks: set[int] | None = None
    ) -> None:
        """Have the object in the store; `blocks`: only these of its blocks."""
        object_info = info(key, len(data), version)
        if len(data) <= limits.INLINE_BYTES_MAX:
            self.store.put_inline(bucket, object_info, data, checked_s=clock.wall_s())
        else:
            landing = self.store.begin(bucket, object_info, checked_s=clock.wall_s())
            for block in range(-(-len(data) // limits.BLOCK_BYTES)):
                if blocks is None or block in blocks:
                    part = data[block * limits.BLOCK_BYTES : (block + 1) * limits.BLOCK_BYTES]
                    landing.write(block * limits.BLOCK_BYTES, part)
                    landing.finish_block(block, xxhash.xxh3_64_intdigest(part))
            landing.close()
        self.store.flush()

    def record(self, key: str, bucket: str = "b") -> Record:
        record = self.store.lookup(bucket, key)
        assert record is not None
        return record

    def data_file(self, key: str, bucket: str = "b") -> Path:
        record = self.record(key, bucket)
        return self.dir / "volumes" / "v0" / "data" / file_name(record.object_id)

    # --- clients ---
    def connect(self) -> Client:
        return Client(socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S))

    def get(self, target: str, method: str = "GET", **headers: str) -> Answer:
        with self.connect() as client:
            return client.ask(target, method, **headers)

    def seen(self, kind: type) -> list[Any]:
        return [message for message in list(self.engine.seen) if isinstance(message, kind)]

    def seen_reads(self, key: str) -> list[wire.OpenRead]:
        return [read for read in self.seen(wire.OpenRead) if read.key == key]

    def snapshot(self) -> Snapshot:
        return merge([self.call(self.front.snapshot)])


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    raw_head: bytes = b""


class Client:
    """A blocking HTTP client that sends exactly what it is told."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def ask(self, target: str, method: str = "GET", body: bytes = b"", **headers: str) -> Answer:
        lines = [f"{method} {target} HTTP/1.1", "Host: localhost"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        self.send("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        return self.answer(method)

    def answer(self, method: str = "GET") -> Answer:
        head = self.until(b"\r\n\r\n")
        lines = head[:-4].decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ")[1])
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        if status == 100 or method == "HEAD" or status in (204, 304):
            body = b""
        elif headers.get("transfer-encoding") == "chunked":
            body = b"".join(self._chunks())
        elif "content-length" in headers:
            body = self.exactly(int(headers["content-length"]))
        else:
            body = self.rest()
        return Answer(status, headers, body, head)

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.until(b"\r\n"), 16):
            yield self.exactly(size)
            assert self.exactly(2) == b"\r\n"
        assert self.exactly(2) == b"\r\n"

    def until(self, mark: bytes) -> bytes:
        while mark not in self.buffer:
            self._more()
        head, _, self.buffer = self.buffer.partition(mark)
        return head + mark

    def exactly(self, size: int) -> bytes:
        while len(self.buffer) < size:
            self._more()
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    def rest(self) -> bytes:
        """Everything until the other side ends, by an end or a reset."""
        while True:
            try:
                part = self.sock.recv(1 << 20)
            except ConnectionResetError:
                part = b""
            if not part:
                data, self.buffer = self.buffer, b""
                return data
            self.buffer += part

    def _more(self) -> None:
        part = self.sock.recv(1 << 20)
        if not part:
            raise EOFError(f"the connection ended after {self.buffer[:200]!r}")
        self.buffer += part


@contextmanager
def serve(dir: Path, *, timeouts: Timeouts = Timeouts(), grace_s: float = 0.3, **settings: Any) -> Iterator[Node]:
    """A node on a directory, running while the block runs."""
    # an engine of a test does not beat
    chosen = Settings(dir=str(dir), listen="127.0.0.1:0", **{"hung_after_s": 0.0, **settings})
    with Node(dir, chosen, timeouts, grace_s) as node:
        yield node
