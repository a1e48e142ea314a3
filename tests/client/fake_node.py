"""A node that is not one: the native API over real sockets, objects in memory, faults on request.

The command line's and the client's tests talk to it wherever a real node would only make them slow, or cannot be made
to misbehave. It says what docs/protocol.md says, with the same structs.
"""

from __future__ import annotations

import email.utils
import hashlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec

from forebay.core.errors import ForebayError, Invalid, NotFound, Precondition
from forebay.core.messages import calls
from forebay.core.messages.doorwire import DoorAt
from forebay.core.messages.native import Completion
from forebay.core.messages.node_state import BucketState, FrontState, MapNode, NodeMap, NodeState
from forebay.core.metrics import Snapshot, render
from forebay.core.types import Bucket, ListEntry, ListPage

STARTED_S = 1_760_000_000.0
MODIFIED_S = 1_750_000_000.0


@dataclass
class Upload:
    """An open upload."""

    bucket: str
    key: str
    headers: dict[str, str]
    parts: dict[int, bytes] = field(default_factory=dict)


class FakeNode:
    """Start with `with FakeNode() as node`; `node.url`. Change `objects`, `cut_after`, … between requests."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, bytes]] = {"corpus": {}}
        self.settings: dict[str, Bucket] = {"corpus": Bucket("corpus", "s3://corpus", created_s=STARTED_S)}
        self.cached: dict[tuple[str, str], int] = {}
        self.pinned: set[tuple[str, str]] = set()
        self.jobs: dict[str, calls.JobState] = {}
        self.job_steps: dict[str, list[calls.JobState]] = {}  # what successive looks at a job see
        self.unreachable: dict[str, ForebayError] = {}
        self.volumes: list[calls.VolumeState] = [
            calls.VolumeState("v0", "/var/lib/forebay/v0", "ok", 1 << 40, 3 << 30, 12)
        ]
        self.snapshots: list[Snapshot] = [Snapshot()]
        self.cut_after: int | None = None  # close the connection where so many bytes of an object are sent
        self.cuts: list[int] = []  # the same for the next answers, one each; -1 is before the answer
        self.on_body: Callable[[str, int], None] = lambda _key, _done: None
        self.answer_raw: bytes | None = None  # instead of anything HTTP
        self.fail_next: list[ForebayError] = []
        self.door: DoorAt | None = None
        self.map: NodeMap | None = None  # None: of itself
        self.page_limit = 1000
        self.no_etag = False
        self.modified: dict[tuple[str, str], float] = {}  # of what was written here
        self.headers: dict[tuple[str, str], dict[str, str]] = {}
        self.uploads: dict[str, Upload] = {}
        self.completed: dict[str, calls.UploadCompleted] = {}
        self.refuse_body: ForebayError | None = None  # said instead of `100 Continue`
        self.on_delete: Callable[[str], ForebayError | None] = lambda _key: None
        self.on_part: Callable[[int], None] = lambda _number: None
        self.lose_answers = 0  # of the next completions: they take effect, and the connection ends
        self.slow_answers = 0  # the next completions say 202 first
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.connections = 0

    def __enter__(self) -> FakeNode:
        node = self

        class Handler(_Handler):
            pass

        Handler.node = node
        self.server = _Server(("127.0.0.1", 0), Handler)
        self.server.node = node
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.close_kept()
        self.server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def etag(self, bucket: str, key: str) -> str:
        return hashlib.md5(self.objects[bucket][key]).hexdigest()

    def requests(self, method: str, part: str = "") -> list[str]:
        return [target for verb, target, _ in self.seen if verb == method and part in target]

    def drop_connections(self) -> None:
        """Close every kept connection, as a node that restarts does."""
        self.server.close_kept()


class _Server(ThreadingHTTPServer):
    request_queue_size = 256  # a burst beyond it waits for retransmissions, seconds each
    daemon_threads = True
    node: FakeNode

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kept: set[socket.socket] = set()

    def get_request(self) -> tuple[socket.socket, Any]:
        sock, address = super().get_request()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._kept.add(sock)
        self.node.connections += 1
        return sock, address

    def shutdown_request(self, request: Any) -> None:
        self._kept.discard(request)
        super().shutdown_request(request)

    def close_kept(self) -> None:
        for sock in list(self._kept):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that vanish are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    node: FakeNode

    def log_message(self, *_: Any) -> None:
        pass

    def handle_expect_100(self) -> bool:
        if self.node.refuse_body is None:
            return super().handle_expect_100()
        error = self.node.refuse_body
        self._answer(error.status, msgspec.json.encode({"error": {"kind": error.kind, "message": error.message}}))
        self.close_connection = True
        return False

    def _serve(self) -> None:
        length = int(self.headers.get("content-length", "0"))
        body = self.rfile.read(length) if length else b""
        node = self.node
        if len(body) < length:  # the connection was closed: nothing of it counts
            # What comes yet is refused at once. A window that was full when `close_kept` came is not opened again, and
            # the client's kernel would ask for it, less and less often, until FIN_WAIT2 has ended: 102 s.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        node.seen.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        if node.answer_raw is not None:
            self.wfile.write(node.answer_raw)
            self.close_connection = True
            return
        path, _, query = self.path.partition("?")
        try:
            if node.fail_next:
                raise node.fail_next.pop(0)
            self._route(path, dict(parse_qsl(query, keep_blank_values=True)), body)
        except ForebayError as error:
            said = {"kind": error.kind, "message": error.message, "code": error.code}
            self._answer(error.status, msgspec.json.encode({"error": said}))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {"Content-Type": "application/json"}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any) -> None:
        self._answer(200, msgspec.json.encode(value))

    def _route(self, path: str, query: dict[str, str], body: bytes) -> None:
        node = self.node
        if path in ("/-/readyz", "/-/healthz"):
            return self._answer(200, b"ok\n", {"Content-Type": "text/plain"})
        if path == "/-/metrics":
            snapshot = node.snapshots.pop(0) if len(node.snapshots) > 1 else node.snapshots[0]
            return self._answer(200, render(snapshot).encode(), {"Content-Type": "text/plain"})
        parts = path.removeprefix("/-/v1/").split("/", 2)
        name = unquote(parts[1]) if len(parts) > 1 else ""
        key = unquote(parts[2]) if len(parts) > 2 else ""
        match parts[0]:
            case "objects" if self.command == "PUT":
                return self._json(self._write(name, key, body))
            case "objects" if self.command == "DELETE":
                self._check(name, key)
                refused = node.on_delete(key)
                if refused is not None:
                    raise refused
                self._bucket(name).pop(key, None)
                return self._json({})
            case "objects":
                return self._object(name, key)
            case "copy":
                call = msgspec.json.decode(body, type=calls.CopyCall)
                data = self._bucket(call.source_bucket).get(call.source_key)
                if data is None:
                    raise NotFound(f"{call.source_bucket}/{call.source_key} does not exist", code="NoSuchKey")
                return self._json(self._write(name, key, data))
            case "uploads" | "parts" | "complete":
                return self._upload(parts[0], name, key, query, body)
            case "stat":
                return self._json(self._stat(name, key))
            case "list":
                return self._json(self._list(name, query))
            case "buckets":
                return self._buckets(name, key, query, body)
            case "jobs":
                return self._json(self._jobs(name))
            case "prefetch" | "pin" | "unpin" | "evict" | "refresh":
                return self._json(self._start(parts[0], msgspec.json.decode(body, type=calls.JobCall)))
            case "status":
                return self._json(self._status())
            case "door" if node.door is not None:
                return self._json(node.door)
            case "map":
                return self._json(node.map or NodeMap(1, [MapNode("n1", node.url)]))
        raise NotFound(f"no such path {path}: see docs/protocol.md")

    def _bucket(self, name: str) -> dict[str, bytes]:
        if name not in self.node.settings:
            raise NotFound(f"bucket {name!r} is not known here: see `forebay bucket ls`", code="NoSuchBucket")
        return self.node.objects.setdefault(name, {})

    def _check(self, bucket: str, key: str) -> None:
        """The conditions of a write."""
        there = key in self._bucket(bucket)
        wanted = self.headers.get("if-match", "").strip('"')
        if (wanted and (not there or wanted != self.node.etag(bucket, key))) or (
            there and self.headers.get("if-none-match") == "*"
        ):
            raise Precondition(f"{bucket}/{key} is not what was expected", code="PreconditionFailed")

    def _write(self, bucket: str, key: str, body: bytes) -> calls.Written:
        self._check(bucket, key)
        node = self.node
        self._bucket(bucket)[key] = body
        node.modified[bucket, key] = time.time()
        node.headers[bucket, key] = {name.lower(): value for name, value in self.headers.items()}
        return calls.Written(node.etag(bucket, key), f"v-{node.etag(bucket, key)}", len(body), time.time())

    def _upload(self, what: str, bucket: str, key: str, query: dict[str, str], body: bytes) -> None:
        node = self.node
        self._bucket(bucket)
        name = query.get("upload_id", "")
        if what == "uploads" and not key:
            found = [self._state(each) for each, at in node.uploads.items() if at.key.startswith(query["prefix"])]
            return self._json(calls.Uploads(sorted(found, key=lambda state: (state.key, state.upload_id)), False))
        if what == "uploads" and self.command == "POST":
            name = f"u&{len(node.uploads) + 1}"
            said = {name.lower(): value for name, value in self.headers.items()}
            stored = {name: said[name] for name in said if name == "content-type" or name.startswith("x-amz-meta-")}
            node.uploads[name] = Upload(bucket, key, stored)
            return self._json(self._state(name))
        if what == "complete" and name in node.completed:
            return self._json(node.completed[name])
        upload = node.uploads.get(name)
        if upload is None or (upload.bucket, upload.key) != (bucket, key):
            raise NotFound("the upload is gone", code="NoSuchUpload")
        if what == "parts":
            number = int(query["number"])
            upload.parts[number] = body
            node.on_part(len(upload.parts))
            return self._json(self._part(upload, number))
        if what == "uploads" and self.command == "GET":
            numbers = sorted(number for number in upload.parts if number > int(query["after"]))
            shown = numbers[: int(query["limit"])]
            state = msgspec.structs.replace(self._state(name), headers=tuple(upload.headers.items()))
            found_parts = [self._part(upload, number) for number in shown]
            return self._json(calls.UploadParts(state, found_parts, len(numbers) > len(shown)))
        if what == "complete":
            return self._complete(name, upload, msgspec.json.decode(body, type=Completion))
        del node.uploads[name]
        return self._json({})

    def _complete(self, name: str, upload: Upload, asked: Completion) -> None:
        node = self.node
        if node.slow_answers:
            node.slow_answers -= 1
            return self._answer(202, b"{}")
        numbers = sorted(upload.parts)
        assert [(part.number, part.etag) for part in asked.parts] == [
            (number, self._part(upload, number).etag) for number in numbers
        ]
        written = self._write(upload.bucket, upload.key, b"".join(upload.parts[number] for number in numbers))
        assert asked.size_bytes == written.size_bytes
        del node.uploads[name]
        node.completed[name] = calls.UploadCompleted(written)
        if node.lose_answers:
            node.lose_answers -= 1
            self.close_connection = True
            return None
        return self._json(node.completed[name])

    def _state(self, name: str) -> calls.UploadState:
        upload = self.node.uploads[name]
        return calls.UploadState(upload.bucket, upload.key, name, STARTED_S)

    @staticmethod
    def _part(upload: Upload, number: int) -> calls.PartState:
        body = upload.parts[number]
        return calls.PartState(number, len(body), hashlib.md5(body).hexdigest(), STARTED_S)

    def _object(self, bucket: str, key: str) -> None:
        node = self.node
        data = self._bucket(bucket).get(key)
        if data is None:
            raise NotFound(f"{bucket}/{key} does not exist", code="NoSuchKey")
        etag = node.etag(bucket, key)
        wanted = self.headers.get("if-match")
        if wanted and wanted.strip('"') != etag:
            raise Precondition(f"{bucket}/{key} has changed", code="PreconditionFailed")
        start, end, status = 0, len(data), 200
        span = self.headers.get("range")
        if span:
            first, _, last = span.removeprefix("bytes=").partition("-")
            if first:
                start, end = int(first), min(len(data), int(last) + 1) if last else len(data)
            else:
                start = max(0, len(data) - int(last))
            if start >= end:
                raise Invalid(f"the range is outside the object of {len(data)} bytes", code="InvalidRange")
            status = 206
        headers = {
            "ETag": f'"{etag}"',
            "Last-Modified": email.utils.formatdate(MODIFIED_S, usegmt=True),
            "Content-Type": "binary/octet-stream",
        }
        if node.no_etag:
            del headers["ETag"]
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        body = data[start:end]
        if self.command == "GET":
            node.cached[bucket, key] = len(data)
        cut_after = node.cuts.pop(0) if node.cuts and self.command == "GET" else node.cut_after
        if cut_after == -1:
            self.close_connection = True
            return
        if cut_after is not None and self.command == "GET":
            self._answer(status, body[: max(0, cut_after - start)], headers, len(body))
            self.wfile.flush()
            node.on_body(key, cut_after)
            self.close_connection = True
            return
        self._answer(status, body, headers)
        if self.command == "GET":
            node.on_body(key, len(body))

    def _stat(self, bucket: str, key: str) -> calls.ObjectState:
        node = self.node
        data = self._bucket(bucket).get(key)
        if data is None:
            raise NotFound(f"{bucket}/{key} does not exist", code="NoSuchKey")
        etag = node.etag(bucket, key)
        return calls.ObjectState(
            bucket, key, len(data), etag, etag, MODIFIED_S, node.cached.get((bucket, key), 0),
            (bucket, key) in node.pinned, False, STARTED_S + 60, {"content-type": "binary/octet-stream"},
        )  # fmt: skip

    def _list(self, bucket: str, query: dict[str, str]) -> Any:
        node, objects = self.node, self._bucket(bucket)
        prefix, delimiter, after = query.get("prefix", ""), query.get("delimiter", ""), query.get("start_after", "")
        limit = min(int(query.get("limit", "1000")), node.page_limit)
        cached = query.get("cached", "") in ("1", "true")
        entries: list[Any] = []
        prefixes: list[str] = []
        last = ""
        for key in sorted(objects, key=lambda key: key.encode()):
            have = node.cached.get((bucket, key), 0)
            if not key.startswith(prefix) or (cached and not have):
                continue
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            common = key[: cut + len(delimiter)] if cut >= 0 else ""
            if (common or key) <= after or (common and common in prefixes) or (common and after.startswith(common)):
                continue
            if len(entries) + len(prefixes) == limit:
                return self._page(cached, entries, prefixes, last)
            last = common + "\U0010ffff" if common else key
            if common:
                prefixes.append(common)
            elif cached:
                pinned = (bucket, key) in node.pinned
                etag = node.etag(bucket, key)
                entries.append(calls.CachedEntry(key, len(objects[key]), etag, MODIFIED_S, have, pinned))
            else:
                modified_s = node.modified.get((bucket, key), MODIFIED_S)
                entries.append(ListEntry(key, len(objects[key]), node.etag(bucket, key), modified_s))
        return self._page(cached, entries, prefixes, "")

    @staticmethod
    def _page(cached: bool, entries: list[Any], prefixes: list[str], after: str) -> Any:
        return calls.CachedPage(entries, prefixes, after) if cached else ListPage(entries, prefixes, after)

    def _buckets(self, name: str, tail: str, query: dict[str, str], body: bytes) -> None:
        node = self.node
        if not name:
            return self._json(list(node.settings.values()))
        if tail == "check":
            self._bucket(name)
            if name in node.unreachable:
                raise node.unreachable[name]
            return self._json({})
        if self.command == "PUT":
            bucket = msgspec.json.decode(body, type=Bucket)
            if query.get("check") == "1" and name in node.unreachable:
                raise node.unreachable[name]
            node.settings[name] = bucket
        elif self.command == "DELETE":
            self._bucket(name)
            del node.settings[name]
            return self._json({})
        self._bucket(name)
        return self._json(node.settings[name])

    def _start(self, verb: str, call: calls.JobCall) -> calls.JobState:
        node = self.node
        objects = self._bucket(call.bucket)
        keys = call.keys or [key for key in sorted(objects) if key.startswith(call.prefix)]
        if verb == "evict":
            keys = [key for key in keys if node.cached.get((call.bucket, key))]
        sizes = [len(objects.get(key, b"")) for key in keys]
        if not call.dry_run:
            for key, size in zip(keys, sizes, strict=True):
                self._do(verb, call.bucket, key, size)
        if verb in ("pin", "unpin") and not call.dry_run:
            settings, pins = node.settings[call.bucket], call.keys or (call.prefix,)
            pinned = {pin for pin in settings.pinned if pin not in pins} | (set(pins) if verb == "pin" else set())
            node.settings[call.bucket] = msgspec.structs.replace(settings, pinned=tuple(sorted(pinned)))
        name = f"{verb}-{len(node.jobs) + 1}"
        done = calls.JobState(
            name, verb, call.bucket, call.prefix, "done", len(keys), 0, len(keys), sum(sizes), sum(sizes),
            STARTED_S, STARTED_S + 2,
        )  # fmt: skip
        steps = node.job_steps.pop(verb, [])
        node.jobs[name] = done
        if steps:
            node.job_steps[name] = [msgspec.structs.replace(step, job=name) for step in steps]
            node.jobs[name] = node.job_steps[name].pop(0)
        return node.jobs[name]

    def _do(self, verb: str, bucket: str, key: str, size: int) -> None:
        node = self.node
        if verb == "evict":
            node.cached.pop((bucket, key), None)
        elif verb == "unpin":
            node.pinned.discard((bucket, key))
        elif verb in ("prefetch", "pin"):
            node.cached[bucket, key] = size
            if verb == "pin":
                node.pinned.add((bucket, key))

    def _jobs(self, name: str) -> Any:
        node = self.node
        if not name:
            return list(reversed(node.jobs.values()))
        if name not in node.jobs:
            raise NotFound(f"job {name!r} is not known: see `forebay job ls`")
        if self.command == "DELETE":
            node.job_steps.pop(name, None)
            node.jobs[name] = msgspec.structs.replace(node.jobs[name], state="cancelled", ended_s=STARTED_S + 3)
        elif node.job_steps.get(name):
            node.jobs[name] = node.job_steps[name].pop(0)
        return node.jobs[name]

    def _status(self) -> NodeState:
        node = self.node
        buckets = [
            BucketState(
                name, bucket.url, sum(size for (at, _), size in node.cached.items() if at == name), bucket.quota_bytes,
                node.unreachable[name].message if name in node.unreachable else "",
            )
            for name, bucket in node.settings.items()
        ]  # fmt: skip
        return NodeState(
            "n1", "0.1.0", 4242, STARTED_S, node.url, [FrontState(0, 4243), FrontState(1, 4244)],
            node.volumes, buckets, flights=2, reads=3, jobs_running=0, pass_bytes=0,
        )  # fmt: skip
