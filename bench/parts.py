"""The parts that rows are built from: files, the remote bucket, the peers and a node, pinned to cores and counted.

Theory. A `Lab` lives as long as one benchmark run. It makes each set of objects once as files, serves the same files
from nginx and the same bytes from SeaweedFS, and starts a fresh node wherever a row needs a cold one. What was read
once is no longer cold, so cold rounds add the remote bucket to the node again *under another name*: every bucket is
cached apart, nothing has to be uploaded twice and nothing evicted.

Cores. With two or more, the server under test has core 0 to itself, client and remote bucket share core 1; a peer
is pinned as the node is. Where the row says that both cores are the limit, nothing is pinned. On one core nothing can
be pinned, and the report says so.

Invariants. (1) Before a set is measured, one object of it was compared byte by byte with its file. (2) Whatever a lab
started is gone when it is closed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from bench import load
from bench.row import Link, Objects
from bench.servers import Nginx, SeaweedFS, Server
from bench.shaper import Shaper
from forebay.client.sync import Client, connect
from forebay.core.errors import ForebayError
from forebay.core.messages.calls import JobVerb
from forebay.core.types import FRESH_IMMUTABLE, LOCAL_URL, Bucket, Durability, WriteMode

BUCKET = "corpus"
KEY_ID, SECRET, TOKEN = "BENCHKEY", "bench-secret-of-the-signed-row", "bench-token"
CHUNK_BYTES = 8 << 20
PRIMED_BYTES_MAX = 1 << 30
QUIET_S = 0.3  # a link on which nothing came for this long has nothing on its way

SERVER_CORE, CLIENT_CORE = (0, 1) if (os.cpu_count() or 1) > 1 else (None, None)


class BenchNginx(Nginx):
    """nginx at its best for static files: one worker, sendfile, descriptors kept open, no log."""

    core: int | None = SERVER_CORE

    def command(self) -> list[str]:
        command = super().command()
        config = self.dir / "nginx.conf"
        text = config.read_text().replace(f"access_log {self.dir}/access.log;", "access_log off;")
        assert "access_log off;" in text, "the nginx configuration changed: the log would be measured too"
        text = text.replace("    sendfile on;", "    open_file_cache max=4096 inactive=60m; sendfile on;")
        assert "open_file_cache" in text
        config.write_text(text)
        return load.on_core(self.core, command)


class CachingNginx(Nginx):
    """nginx as a cache in front of the bucket at `origin`, with `proxy_cache`: it does what a node does with a cold
    object (receives it, keeps it in a file, sends it on), in C, and promises less.

    `/NAME/key` is the bucket's `key`, cached apart for each NAME. Not pinned; nothing is synced or compared.
    """

    name = "caching-nginx"

    def __init__(self, origin: str, bucket: str) -> None:
        super().__init__(Path())
        self._origin, self._bucket = origin.removeprefix("http://"), bucket

    def command(self) -> list[str]:
        command = super().command()
        config = self.dir / "nginx.conf"
        text = config.read_text().replace(f"access_log {self.dir}/access.log;", "access_log off;")
        head, server, _ = text.partition("    server {")
        assert server, "the nginx configuration changed"
        config.write_text(f"""{head}
    proxy_cache_path {self.dir}/cache levels=1:2 keys_zone=objects:10m max_size=100g use_temp_path=off;
    proxy_http_version 1.1; proxy_set_header Connection "";
    proxy_buffers 16 64k; proxy_buffer_size 64k; proxy_busy_buffers_size 256k;
    proxy_cache objects; proxy_cache_key $request_uri; proxy_cache_valid 200 1h;
    upstream origin {{ server {self._origin}; keepalive 32; }}
    server {{
        listen 127.0.0.1:{self.ports[0]} backlog=1024; merge_slashes off;
        location ~ ^/[^/]+/(?<key>.*)$ {{ proxy_pass http://origin/{self._bucket}/$key; }}
    }}
}}
""")
        return command


class Node(Server):
    """A Forebay node with a directory of its own: a supervisor, an engine and fronts, as a user starts it.

    With `signed` it has one identity, so that every S3 request must carry a good signature.
    """

    name = "node"

    def __init__(
        self,
        *,
        fronts: int = 1,
        capacity_bytes: int = 0,
        core: int | None = None,
        signed: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.fronts, self.capacity_bytes, self.core, self.signed = fronts, capacity_bytes, core, signed
        self.options = options

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.ports[0]}"

    def client(self) -> Client:
        """A client of this node; close it, or use it with `with`."""
        return connect(self.endpoint, token=TOKEN if self.signed else "")

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "forebay.node", "--dir", str(self.dir / "node")]
        command += ["--listen", f"{self.host}:{self.ports[0]}", "--fronts", str(self.fronts), *self.options]
        if self.capacity_bytes:
            command += ["--capacity", str(self.capacity_bytes)]
        if self.signed:
            one = {"name": "bench", "access_key_id": KEY_ID, "secret_access_key": SECRET, "token": TOKEN}
            file = self.dir / "identities.json"
            file.write_text(json.dumps({"identities": [{**one, "allow": "admin:*"}]}))
            file.chmod(0o600)
            command += ["--identities", str(file)]
        return load.on_core(self.core, command)

    def is_ready(self) -> bool:
        try:
            with self.client() as client:
                return client.ready()
        except ForebayError:
            return False

    def add_bucket(self, name: str, lab: Lab, endpoint: str = "", write: WriteMode = "through") -> None:
        """The lab's bucket under `name`, reached at `endpoint` (by default SeaweedFS itself).

        Immutable: the rows measure reads, not revalidations.
        """
        options = {"region": "us-east-1", "skip_signature": "true", "endpoint": endpoint or lab.weed.endpoint}
        with self.client() as client:
            client.bucket_put(Bucket(name, f"s3://{BUCKET}", freshness_s=FRESH_IMMUTABLE, options=options, write=write))

    def add_local(self, name: str, durability: Durability) -> None:
        """A bucket that only this node has."""
        with self.client() as client:
            client.bucket_put(Bucket(name, LOCAL_URL, write="local", durability=durability))

    def flush(self, bucket: str) -> None:
        """Return when all that was written to `bucket` is in its backend."""
        self._job("flush", bucket, "")

    def prefetch(self, bucket: str, prefix: str) -> None:
        """Return when everything under `prefix` is in the cache."""
        self._job("prefetch", bucket, prefix)

    def _job(self, verb: JobVerb, bucket: str, prefix: str) -> None:
        with self.client() as client:
            job = client.start_job(verb, bucket, prefix)
            while job.state == "running":
                time.sleep(0.05)
                job = client.job(job.job)
        if job.state != "done" or job.units_failed:
            raise load.LoadFailed(f"{verb} of {bucket}/{prefix} ended {job.state}: {'; '.join(job.errors)}")

    def counter(self, name: str, **labels: str) -> float:
        """The sum of a counter's series whose labels include `labels`."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        with self.client() as client:
            values = client.metrics().values
        return sum(
            value
            for series, value in values.items()
            if series.partition("{")[0] == name and all(pair in series for pair in wanted)
        )

    def processes(self) -> list[int]:
        """Engine and fronts: the supervisor's children."""
        return [int(child) for child in _children(self.pid)]

    def kill(self) -> None:
        """Kill all of its processes, which are groups of their own."""
        children = self.processes()
        super().kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        while any(Path(f"/proc/{child}").exists() for child in children):
            time.sleep(0.01)


class Remote:
    """The bucket at the far end of a link. `endpoint` is what its readers use."""

    def __init__(self, shaper: Shaper, bucket: Server) -> None:
        self._shaper, self._bucket = shaper, bucket
        self.endpoint = shaper.endpoint

    def give_way(self) -> None:
        """Take no core from anybody, as what is elsewhere takes none."""
        for server in (self._shaper, self._bucket):
            give_way(server.pid)

    def bytes_down(self) -> int:
        """Bytes that have come over the link so far: bodies and heads."""
        return self._shaper.counters()["response_bytes"]

    def settle(self) -> None:
        """Return when nothing comes any more, so that read-ahead is counted too."""
        before = -1
        while before != (now := self.bytes_down()):
            before = now
            time.sleep(QUIET_S)


def _children(pid: int) -> list[str]:
    found: list[str] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += (task / "children").read_text().split()
    return found


def resident_bytes(pid: int) -> int:
    """RSS of a process, shared pages included."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


class Lab:
    """Everything a run needs, made when first asked for. A context manager; see the module's header."""

    def __init__(self, *, quick: bool = False) -> None:
        self.quick = quick
        self._stack = contextlib.ExitStack()
        self.dir = Path()
        self._nginx: BenchNginx | None = None
        self._weed: SeaweedFS | None = None
        self._uploaded: set[str] = set()

    def __enter__(self) -> Self:
        self.dir = Path(tempfile.mkdtemp(prefix="forebay-bench-"))
        self._stack.callback(shutil.rmtree, self.dir, ignore_errors=True)
        self.files.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        load.pin_self(None)
        self._stack.close()

    def unpin(self) -> None:
        """Undo what a row did to where this process and the bucket run."""
        load.pin_self(None)
        if self._weed is not None:
            pin(self._weed.pid, None)

    @property
    def files(self) -> Path:
        """The directory that nginx serves; it mirrors the bucket."""
        return self.dir / "files"

    # --- objects -----------------------------------------------------------------------------------------------------
    def make(self, objects: Objects) -> None:
        """The objects as files, random bytes; made once."""
        for index in range(objects.count):
            path = self.files / objects.key(index)
            if path.exists() and path.stat().st_size == objects.size_bytes:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for at in range(0, objects.size_bytes, CHUNK_BYTES):
                    file.write(os.urandom(min(CHUNK_BYTES, objects.size_bytes - at)))

    def upload(self, objects: Objects) -> None:
        """The same bytes in the remote bucket; uploaded once."""
        self.make(objects)
        self.upload_files([objects.key(index) for index in range(objects.count)])

    def upload_files(self, keys: Sequence[str]) -> None:
        """Files of `files` in the remote bucket; each uploaded once."""
        weed = self.weed
        with ThreadPoolExecutor(4) as pool:
            new = [key for key in keys if key not in self._uploaded]
            list(pool.map(lambda key: upload_file(weed, key, self.files / key), new))
        self._uploaded.update(new)

    def prime_memory(self, size_bytes: int) -> None:
        """See that the kernel has pages at hand for `size_bytes` of new file data, for the next seconds.

        On a virtual machine whose free memory goes back to the host (free page reporting: two seconds after it was
        freed), the first touch of a page costs fifteen times the write itself (measured: 0.37 GB/s instead of 5.5).
        That is the machine's and not the node's; so a file of twice that size (what is freed first is not what is
        taken first) is written and removed before each cold round, of both sides.
        """
        path = self.dir / "primed"
        piece = bytes(CHUNK_BYTES)
        with path.open("wb", buffering=0) as file:
            for _ in range(2 * min(size_bytes, PRIMED_BYTES_MAX) // CHUNK_BYTES + 1):
                file.write(piece)
        path.unlink()

    def compare(self, endpoint: str, path: str, key: str) -> None:
        """Raise `LoadFailed` unless what `path` serves is the file of `key`, byte for byte."""
        body = bytearray()
        with load.Reader(endpoint) as reader:
            reader.get(path, into=body)
        if body != (self.files / key).read_bytes():
            raise load.LoadFailed(f"{endpoint}{path} does not serve the bytes of {key}")

    # --- servers -----------------------------------------------------------------------------------------------------
    @property
    def nginx(self) -> BenchNginx:
        if self._nginx is None:
            self._nginx = self._stack.enter_context(BenchNginx(self.files))
        return self._nginx

    @property
    def weed(self) -> SeaweedFS:
        """The remote bucket, not pinned."""
        if self._weed is None:
            self._weed = self._stack.enter_context(SeaweedFS())
            self._weed.create_bucket(BUCKET)
        return self._weed

    @contextlib.contextmanager
    def remote(self, link: Link, core: int | None = None, bucket: Server | None = None) -> Iterator[Remote]:
        """The bucket behind `link`; bucket (SeaweedFS, or another server of S3) and link run on `core`, or anywhere."""
        bucket = bucket or self.weed
        pin(bucket.pid, core)
        shaper = Shaper(
            f"http://{bucket.host}:{bucket.ports[0]}",
            rate_bytes_s=link.rate_bytes_s,
            latency_s=link.latency_s,
            connection_rate_bytes_s=link.connection_bytes_s,
            request_rate_bytes_s=link.rate_bytes_s,
        )
        with shaper:
            pin(shaper.pid, core)
            yield Remote(shaper, bucket)

    @contextlib.contextmanager
    def node(
        self, *, fronts: int = 1, capacity_bytes: int = 0, core: int | None = SERVER_CORE, signed: bool = False
    ) -> Iterator[Node]:
        """A fresh, empty node for the length of a `with` block."""
        with Node(fronts=fronts, capacity_bytes=capacity_bytes, core=core, signed=signed) as node:
            yield node


def upload_file(weed: Server, key: str, path: Path) -> None:
    """Put a file into the bucket of SeaweedFS's S3, which listens at its first port."""
    connection = http.client.HTTPConnection(weed.host, weed.ports[0], timeout=300)
    with contextlib.closing(connection), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        connection.request("PUT", f"/{BUCKET}/{key}", body=file, headers={"Content-Length": str(size)})
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise load.LoadFailed(f"SeaweedFS answered {answer.status} to an upload of {key}")


def pin(pid: int, core: int | None) -> None:
    """Move a running process, with all its threads and children, to one core, or let it roam."""
    cores = set(range(os.cpu_count() or 1)) if core is None else {core}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(task.name), cores)
    for child in _children(pid):
        pin(int(child), core)


def give_way(pid: int) -> None:
    """Have a running process, with all its threads and children, run only on what others leave of the cores."""
    with contextlib.suppress(OSError):  # where sessions share the cores evenly, a priority counts within one
        Path(f"/proc/{pid}/autogroup").write_text("19")
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
    for child in _children(pid):
        give_way(int(child))
