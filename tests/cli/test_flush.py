"""`forebay flush` and what `down` does about dirty data, with a real node."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.client.sync import Client
from tests.cli.conftest import Program

pytestmark = pytest.mark.real


@pytest.fixture
def real(tmp_path: Path, free_port: int) -> Iterator[Program]:
    """The program with a directory and port of its own; whatever runs from that directory is stopped at the end."""
    program = Program(f"http://127.0.0.1:{free_port}", tmp_path / "node")
    program.env["FOREBAY_LISTEN"] = f"127.0.0.1:{free_port}"
    yield program
    program("down", "--timeout", "60", "--no-flush")


def up(program: Program, *args: str) -> None:
    out, err = program.process(
        "up", "--listen", program.env["FOREBAY_LISTEN"], "--fronts", "1", "--json", *args
    ).communicate(timeout=120)
    assert (err, json.loads(out)["started"]) == (b"", True)


def status_of(program: Program, name: str) -> dict[str, object]:
    found = json.loads(program("status", "--json").stdout)["buckets"]
    return next(bucket for bucket in found if bucket["name"] == name)


def test_dirty_data_is_flushed_on_demand_and_by_down_and_kept_where_it_cannot_be(real: Program, tmp_path: Path) -> None:
    place, stuck = tmp_path / "bucket", tmp_path / "stuck"
    place.mkdir()
    stuck.mkdir()
    (stuck / "k").write_bytes(b"a file where a directory would have to be")
    up(real, "--flush-timeout", "30")
    real("bucket", "add", "data", f"file://{place}", "--write", "back")
    real("bucket", "add", "stuck", f"file://{stuck}", "--write", "back")
    bodies = {f"a/{number}": os.urandom(size) for number, size in enumerate((5, 20_000, 9_000_000))}
    with Client(real.env["FOREBAY_URL"]) as client:
        for key, body in bodies.items():
            client.put("data", key, body)
        assert real("flush", "data/a/").stdout.startswith("flushed s3://data/a/: ")
        assert {key: (place / key).read_bytes() for key in bodies} == bodies
        assert real("flush").stdout == "nothing is dirty: the backends have all that was written\n"
        assert json.loads(real("flush", "--json").stdout) == []
        assert "name the objects" in real("flush", "--exact", code=2).stderr
        client.put("stuck", "k/x", b"only here")
        assert "1 of 1 object failed" in real("flush", code=9).stderr
        assert status_of(real, "stuck")["dirty_objects"] == 1
        assert "flush of k/x" in str(status_of(real, "stuck")["error"])
        client.put("stuck", "k/x", b"only here, still")
        assert re.search(r"^DIRTY IN .*\nstuck +1 +16 B ", real("status").stdout, re.MULTILINE)
    stopped = json.loads(real("down", "--no-flush", "--json").stdout)
    assert (stopped["owed_objects"], stopped["owed_bytes"]) == (1, len(b"only here, still"))
    up(real)
    state = status_of(real, "stuck")
    assert (state["dirty_objects"], state["dirty_bytes"]) == (1, len(b"only here, still"))
    with Client(real.env["FOREBAY_URL"]) as client:
        assert client.get("stuck", "k/x") == b"only here, still"
        client.put("data", "goodbye", b"x" * 20_000)
    said = real("down").stdout
    assert (place / "goodbye").read_bytes() == b"x" * 20_000
    assert "not yet in the backends: 1 object or deletes (16 B)" in said
