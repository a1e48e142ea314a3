"""A front that stands still is told of bytes; the disk fills up or the engine dies meanwhile; it wakes and reads on."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from forebay.backends.http.pace import CHUNK_BYTES_MIN
from tests.patience import PATIENCE_S, until

from .conftest import MIB, NodeProcess, pattern
from .test_rot import flip

Make = Callable[..., NodeProcess]
pytestmark = pytest.mark.real
DATA = pattern(14 * MIB)
LANDED_BYTES = 6 * MIB  # a whole block, which is listed, and half of one


class GatedBucket:
    """A bucket with one object, none of whose bytes come before `begin` is set, and those from LANDED_BYTES on after
    `open`."""

    def __init__(self) -> None:
        self.begin, self.open = threading.Event(), threading.Event()
        bucket = self

        class Handler(BaseHTTPRequestHandler):
            timeout = PATIENCE_S

            def do_GET(self) -> None:
                if not self.path.endswith("/object"):
                    page = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(page)))
                    self.end_headers()
                    self.wfile.write(page)
                    return
                first, last = 0, len(DATA) - 1
                if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                    first, last = int(asked[1]), min(last, int(asked[2] or last))
                self.send_response(206)
                self.send_header("Content-Length", str(last + 1 - first))
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(DATA)}")
                self.send_header("ETag", '"one"')
                self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
                self.end_headers()
                try:
                    bucket.begin.wait(PATIENCE_S)
                    self.wfile.write(DATA[first : min(last + 1, LANDED_BYTES)])
                    bucket.open.wait(PATIENCE_S)
                    self.wfile.write(DATA[max(first, LANDED_BYTES) : last + 1])
                except ConnectionError:
                    pass  # the engine died, or nobody reads any more

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False  # `close` waits for the requests under way
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def options(self) -> dict[str, str]:
        endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        return {"endpoint": endpoint, "region": "us-east-1", "skip_signature": "true"}

    def close(self) -> None:
        self.begin.set()
        self.open.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Getting(threading.Thread):
    """One GET of the object, or of its `first_bytes`, on a connection of its own; `body` is what came, `whole` whether
    it was all."""

    def __init__(self, one: NodeProcess) -> None:
        super().__init__(daemon=True)
        url = urlsplit(one.endpoint)
        self._connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=PATIENCE_S)
        self._connection.connect()
        self.node_port = url.port or 0
        self.port = self._connection.sock.getsockname()[1]
        self.expected, self.headers = DATA, {}
        self.body = bytearray()
        self.whole = False
        self.is_enough: Callable[[], bool] = lambda: True  # else it reads again

    def first_bytes(self, size: int) -> None:
        self.expected, self.headers = DATA[:size], {"Range": f"bytes=0-{size - 1}"}

    def run(self) -> None:
        try:
            self._read()
            while self.whole and not self.is_enough():
                self._read()
        except http.client.IncompleteRead as error:
            self.body += error.partial
        except OSError:
            pass
        finally:
            self._connection.close()

    def _read(self) -> None:
        self.body.clear()
        self._connection.request("GET", "/gated/object", headers=self.headers)
        response = self._connection.getresponse()
        while piece := response.read(MIB):
            self.body += piece
        self.whole = len(self.body) == len(self.expected)

    def ask(self, method: str, target: str, body: bytes | None) -> None:
        """Another request instead; it may be made again."""
        self._connection.request(method, target, body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        answer = response.read()
        assert response.status < 300, answer

    def close(self) -> None:
        self._connection.close()

    def front(self, fronts: dict[str, int]) -> int:
        """Which process has the other end; 0 while none has."""
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ends = tuple(f":{port:04X}" for port in (self.node_port, self.port))
        # The table is read in pieces while it changes, so a row may come twice, or not this time.
        found = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(ends[0]) and row[2].endswith(ends[1])}
        return next((pid for pid in fronts.values() if found & open_files(pid)), 0)


def open_files(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(str(link.readlink()))
        except OSError:
            continue  # closed meanwhile
    return found


class Story:
    """A node on a small disk with readers of one object on two fronts, one of which was stopped before bytes came.
    `alone`: on that front only, since whoever has the file open keeps holes away from it; `finder` may read later."""

    def __init__(self, make: Make, disk: Path, *, alone: bool) -> None:
        self.bucket = GatedBucket()
        self.disk = disk
        config = disk / "node.toml"
        config.write_text("hung_after_s = 0\n")  # one of them hangs for as long as the test says
        self.one = make("--fronts", "2", "--volume", str(disk / "volume"), "--config", str(config))
        self.one.add_bucket("gated", "s3://b", **self.bucket.options)
        until(lambda: len(self.one.children()) == 3)
        fronts = {name: pid for name, pid in self.one.children().items() if name != "engine"}
        self.awake: list[Getting] = []
        self.asleep: list[Getting] = []  # on the front that is stopped
        self.stopped = next(iter(fronts.values()))
        while len(self.awake) < 2 or len(self.asleep) < 4:
            reader = Getting(self.one)
            side = self.asleep if until(partial(reader.front, fronts)) == self.stopped else self.awake
            side.append(reader)
        self.asking, self.asking_asleep = self.awake.pop(), self.asleep.pop()
        self.finder = self.awake.pop() if alone else None
        for reader in (*self.awake, *self.asleep):
            reader.start()
        until(lambda: self.one.metric("forebay_reads_waiting") == len(self.awake) + len(self.asleep))
        os.kill(self.stopped, signal.SIGSTOP)
        self.bucket.begin.set()
        # The node takes bytes by the chunk: what came of the next one waits in it for the rest.
        until(lambda: self.landed_bytes() > LANDED_BYTES - CHUNK_BYTES_MIN)

    def landed_bytes(self) -> int:
        files = [path for path in (self.disk / "volume" / "data").rglob("*") if path.is_file()]
        return sum(path.stat().st_blocks * 512 for path in files)

    def reclaim(self) -> None:
        """Have the engine commit, and give back what it may."""
        settings = {"name": "gone", "url": f"file://{self.disk}"}
        self.asking.ask("PUT", "/-/v1/buckets/gone", json.dumps(settings).encode())
        self.asking.ask("DELETE", "/-/v1/buckets/gone", None)
        for _ in range(10):
            self.asking.ask("GET", "/-/v1/status", None)

    def wake_and_compare(self, *, whole: bool) -> None:
        """`whole`: no answer may be cut, as one is where no engine comes back in time."""
        os.kill(self.stopped, signal.SIGCONT)
        for reader in (*self.awake, *self.asleep):
            reader.join(PATIENCE_S)
            assert not reader.is_alive()
            assert reader.body == reader.expected[: len(reader.body)], "wrong bytes in an answer"
            assert reader.whole or not whole, "an answer was cut"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of its own with 64 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", path], check=False).returncode:
        pytest.skip("mounting a small filesystem needs root")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture
def alone() -> bool:
    return False


@pytest.fixture
def story(node: Make, small_disk: Path, alone: bool) -> Iterator[Story]:
    made = Story(node, small_disk, alone=alone)
    yield made
    made.bucket.close()
    made.asking.close()
    made.asking_asleep.close()
    if made.stopped in made.one.children().values():
        os.kill(made.stopped, signal.SIGCONT)


def test_a_disk_that_fills_up_under_a_front_that_stands_still(story: Story) -> None:
    with open(story.disk / "somebody-elses", "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(MIB)) == MIB:
            pass  # until it is full
    story.bucket.open.set()
    for reader in story.awake:
        reader.join(PATIENCE_S)
        assert reader.whole
    story.reclaim()
    story.wake_and_compare(whole=True)
    assert story.one.metric("forebay_passed_bytes_total") > 0
    until(lambda: story.one.json("GET", "status")["reads"] == 0)


@pytest.mark.parametrize("alone", [True])
def test_a_block_that_turns_out_to_be_wrong_under_a_front_that_stands_still(story: Story) -> None:
    [file] = [path for path in (story.disk / "volume" / "data").rglob("*") if path.is_file()]
    flip(file, MIB)
    story.bucket.begin.clear()  # nobody puts it right before the front has come to what it was told of
    assert story.finder is not None
    story.finder.first_bytes(10)
    # Bytes are there before the index lists their block, and only listed ones are compared.
    story.finder.is_enough = lambda: "did not match their checksum" in story.one.log
    story.finder.start()
    until(story.finder.is_enough)
    story.reclaim()
    os.kill(story.stopped, signal.SIGCONT)
    for _ in range(10):
        story.asking_asleep.ask("GET", "/-/v1/status", None)
    story.bucket.begin.set()
    story.bucket.open.set()
    story.awake.append(story.finder)
    story.wake_and_compare(whole=True)


def test_an_engine_that_dies_under_a_front_that_stands_still(story: Story) -> None:
    engine = story.one.children()["engine"]
    os.kill(engine, signal.SIGKILL)
    until(lambda: story.one.children().get("engine", engine) != engine)
    until(lambda: story.landed_bytes() <= 4 * MIB)  # the next engine swept what no record names
    story.bucket.open.set()
    story.wake_and_compare(whole=False)
