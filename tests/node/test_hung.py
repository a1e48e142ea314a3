"""A process of the node that is alive and does nothing: noticed, told, replaced."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from .conftest import NodeProcess, until

Make = Callable[..., NodeProcess]
pytestmark = pytest.mark.real


@pytest.fixture
def impatient(node: Make, tmp_path: Path) -> NodeProcess:
    """A node of one front that waits two seconds for a sign of life, with a bucket in which only "warm" is cached."""
    (tmp_path / "node.toml").write_text("hung_after_s = 2\n")
    one = node("--fronts", "1", "--config", str(tmp_path / "node.toml"))
    (tmp_path / "bucket").mkdir()
    for name in ("warm", "cold"):
        (tmp_path / "bucket" / name).write_bytes(name.encode())
    one.add_bucket("files", f"file://{tmp_path / 'bucket'}")
    until(lambda: one.get("files", "warm") == b"warm" and _counts(one, 'forebay_reads_total{result="hit"} 1'))
    return one


def _ready(one: NodeProcess) -> tuple[int, str]:
    status, body = one.ask("GET", "/-/readyz")
    return status, json.loads(body)["missing"]


def _counts(one: NodeProcess, line: str) -> bool:
    with suppress(OSError, http.client.HTTPException):
        return line in one.ask("GET", "/-/metrics")[1].decode()
    return False  # the front is being replaced


def _restarts(one: NodeProcess, process: str) -> bool:
    return _counts(one, f'forebay_process_restarts_total{{process="{process}",reason="hung"}}')


def test_a_hung_engine_is_replaced(impatient: NodeProcess) -> None:
    one = impatient
    engine = one.children()["engine"]
    os.kill(engine, signal.SIGSTOP)
    status, _ = one.ask("GET", "/files/cold")
    assert status in (200, 503), "it ends, and may have waited for the next engine"
    until(lambda: one.children().get("engine", engine) != engine)
    until(lambda: _ready(one)[0] == 200)
    assert one.get("files", "cold") == b"cold"
    until(lambda: _restarts(one, "engine"))
    assert "engine hangs" in one.log


def test_fronts_tell_of_an_engine_that_hangs(impatient: NodeProcess) -> None:
    one = impatient
    assert one.process is not None
    engine = one.children()["engine"]
    os.kill(one.process.pid, signal.SIGSTOP)  # nobody replaces it
    try:
        os.kill(engine, signal.SIGSTOP)
        url = urlsplit(one.endpoint)
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
        connection.request("GET", "/files/cold")
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("Retry-After")) == (503, "1"), answer.read()
        connection.close()
        _, reason = until(lambda: (told := _ready(one))[0] == 503 and told)
        assert "the engine hangs" in reason
        assert one.get("files", "warm") == b"warm", "a hit needs no engine"
        os.kill(engine, signal.SIGCONT)
        until(lambda: _ready(one)[0] == 200)
        assert one.get("files", "cold") == b"cold"
    finally:
        os.kill(engine, signal.SIGCONT)
        os.kill(one.process.pid, signal.SIGCONT)


def test_a_hung_front_is_replaced(impatient: NodeProcess) -> None:
    one = impatient
    front = one.children()["front 0"]
    os.kill(front, signal.SIGSTOP)
    until(lambda: one.children().get("front 0", front) != front)
    until(lambda: _restarts(one, "front-0"))
    assert one.get("files", "warm") == b"warm"
    assert one.get("files", "cold") == b"cold"


def test_before_it_counts_as_hung_a_process_shows_where_it_stands() -> None:
    """Also while it waits in the kernel for what never comes: no signal handler has to run."""
    story = """
import asyncio, logging, os
from forebay.node.process import child, logs

logging.basicConfig()
logging.getLogger().handlers[0].setFormatter(logs.JsonLines("engine"))

def stand_still():
    os.read(os.pipe()[0], 1)

loop = asyncio.new_event_loop()
child.beat(loop, 1.0, fd=os.open(os.devnull, os.O_WRONLY))
loop.call_soon(stand_still)
loop.run_forever()
"""
    with subprocess.Popen([sys.executable, "-c", story], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = json.loads(process.stderr.readline())
        process.kill()
    assert said["message"] == "the loop has stood still for 0.75 s, here:"
    assert "in stand_still" in said["stack"]
