"""The shaper between a client and a real web server: it changes time and fate, never bytes."""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.servers import Nginx
from bench.shaper import Bucket, Shaper

pytestmark = pytest.mark.real
SIZE = 24_000_000


@pytest.fixture(scope="module")
def data(http_server: Nginx) -> bytes:
    data = os.urandom(SIZE)
    (http_server.root / "shaped").mkdir()
    (http_server.root / "shaped" / "data").write_bytes(data)
    (http_server.root / "shaped" / "small").write_bytes(b"small")
    return data


@pytest.fixture
def link(http_server: Nginx, data: bytes) -> Iterator[Shaper]:
    with Shaper(http_server.url) as shaper:
        yield shaper


def get(link: Shaper, name: str = "data") -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", link.port, timeout=30)
    try:
        connection.request("GET", f"/shaped/{name}")
        return connection.getresponse().read()
    finally:
        connection.close()


def test_bytes_pass_unchanged_on_many_connections_at_once(link: Shaper, data: bytes) -> None:
    wanted = hashlib.sha256(data).digest()
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(hashlib.sha256(get(link)).digest())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [wanted] * 6
    counters = link.counters()
    assert counters["connections"] == 6
    assert 6 * SIZE < counters["response_bytes"] < 6 * SIZE + 6 * 1000


def test_the_rate_holds_for_all_connections_together(link: Shaper, data: bytes) -> None:
    link.set(rate_bytes_s=60e6)
    began_s = time.monotonic()
    threads = [threading.Thread(target=get, args=(link,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = 4 * SIZE / (time.monotonic() - began_s)
    assert rate < 60e6 * 1.02, "a link is never faster than it says"


def test_each_connection_has_its_own_rate(link: Shaper, data: bytes) -> None:
    """One that is fast to read takes no tokens of another: what one may send is counted by itself."""
    link.set(connection_rate_bytes_s=40e6)
    took_s: list[float] = []

    def timed() -> None:
        began_s = time.monotonic()
        get(link)
        took_s.append(time.monotonic() - began_s)

    threads = [threading.Thread(target=timed) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(took_s) == 3
    assert SIZE / min(took_s) < 40e6 * 1.02, "none is faster than it says"
    one, other = Bucket(40e6), Bucket(40e6)
    now_s = max(one.filled_s, other.filled_s) + 1
    while one.room(now_s):
        one.take(one.room(now_s))
    assert other.room(now_s) > 0, "another connection's bytes are still its own"


def test_every_round_trip_takes_the_latency_longer(link: Shaper) -> None:
    link.set(latency_s=0.05)
    connection = http.client.HTTPConnection("127.0.0.1", link.port, timeout=30)
    for _ in range(3):
        began_s = time.monotonic()
        connection.request("GET", "/shaped/small")
        assert connection.getresponse().read() == b"small"
        assert time.monotonic() - began_s >= 0.05
    connection.close()


def test_pipelined_requests_share_one_latency(link: Shaper) -> None:
    """A delay line, not a queue of delays: what is sent together arrives together."""
    link.set(latency_s=1.0)
    request = b"GET /shaped/small HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", link.port), timeout=30) as sock:
        began_s = time.monotonic()
        sock.sendall(request * 10)
        got = b""
        while got.count(b"small") < 10:
            got += sock.recv(65536)
        assert 1.0 <= time.monotonic() - began_s < 10 * 1.0, "ten delays one after the other would take ten"


def test_a_reset_comes_after_exactly_so_many_bytes_and_only_as_often_as_asked(link: Shaper, data: bytes) -> None:
    link.set(fault="reset-after=1000000", count=2)
    for _ in range(2):
        with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
            get(link)
    assert get(link) == data
    assert link.counters()["faults"] == 2


def test_a_body_can_be_cut_short_without_a_reset(link: Shaper) -> None:
    link.set(fault="close-after=500000", count=1)
    with socket.create_connection(("127.0.0.1", link.port), timeout=30) as sock:
        sock.sendall(b"GET /shaped/data HTTP/1.1\r\nHost: x\r\n\r\n")
        got = 0
        while piece := sock.recv(65536):
            got += len(piece)
    assert got == 500_000


def test_a_stalled_connection_stays_open_and_silent(link: Shaper, data: bytes) -> None:
    link.set(fault="stall-after=300000", count=1)
    with socket.create_connection(("127.0.0.1", link.port), timeout=0.5) as sock:
        sock.sendall(b"GET /shaped/data HTTP/1.1\r\nHost: x\r\n\r\n")
        got = 0
        while got < 300_000:
            got += len(sock.recv(65536))
        assert got == 300_000
        with pytest.raises(TimeoutError):
            sock.recv(1)
        assert get(link) == data, "others are not held up"
        assert link.counters()["open"] >= 1


def test_cutting_resets_what_is_open_and_refusing_what_comes(link: Shaper) -> None:
    with socket.create_connection(("127.0.0.1", link.port), timeout=30) as sock:
        sock.sendall(b"GET /shaped/small HTTP/1.1\r\nHost: x\r\n\r\n")
        got = b""
        while b"small" not in got:
            got += sock.recv(65536)
        link.cut()
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    link.set(fault="refuse")
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        get(link, "small")
    link.set(fault="none")
    assert get(link, "small") == b"small"


def test_a_request_with_a_body_passes_too(http_server: Nginx, link: Shaper) -> None:
    """nginx takes no uploads here and says so; the body does not hang the proxy."""
    connection = http.client.HTTPConnection("127.0.0.1", link.port, timeout=30)
    connection.request("POST", "/shaped/small", body=b"x" * 100_000)
    assert connection.getresponse().status == 405
    connection.close()


def test_settings_that_are_not_known_are_refused(link: Shaper) -> None:
    with pytest.raises(ValueError, match="not a setting"):
        link.set(speed=1)
    with pytest.raises(ValueError, match="not known"):
        link.set(fault="explode")


def test_a_bucket_keeps_a_burst_when_idle_and_catches_up_when_waited_for() -> None:
    bucket = Bucket(100e6)
    start_s = bucket.filled_s
    bucket.rest()
    assert bucket.room(start_s + 10.0) > 0
    assert bucket.tokens == bucket.burst_bytes
    bucket.take(int(bucket.burst_bytes))
    assert bucket.room(start_s + 10.05) > 0
    assert bucket.tokens == pytest.approx(5e6, rel=0.01), "woken 50 ms late: nothing is lost"
    bucket.rest()
    assert bucket.tokens <= bucket.burst_bytes


def test_the_process_ends_with_its_owner(http_server: Nginx, tmp_path: Path) -> None:
    shaper = Shaper(http_server.url)
    shaper.start()
    pid, folder = shaper.pid, shaper.dir
    shaper.stop()
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


class Taking:
    """A server that reads everything it is sent and says at the end how much that was."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.digests: list[bytes] = []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            with sock:
                taken = hashlib.sha256()
                while data := sock.recv(1 << 20):
                    taken.update(data)
                self.digests.append(taken.digest())
                sock.sendall(b"thanks")


def send(port: int, data: bytes) -> float:
    """Seconds until the server has thanked for all of it."""
    began_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(100) == b"thanks"
    return time.monotonic() - began_s


def test_what_clients_send_is_held_to_its_own_rate() -> None:
    data = os.urandom(12_000_000)
    taking = Taking()
    with Shaper(f"127.0.0.1:{taking.listener.getsockname()[1]}", request_rate_bytes_s=60e6, latency_s=0.01) as link:
        seconds: list[float] = []
        threads = [threading.Thread(target=lambda: seconds.append(send(link.port, data))) for _ in range(2)]
        began_s = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s = time.monotonic() - began_s
        assert taking.digests == [hashlib.sha256(data).digest()] * 2
        assert 2 * len(data) / took_s < 60e6 * 1.02, "never faster than it says"
        link.set(request_rate_bytes_s=0)
        send(link.port, data)
    taking.listener.close()
