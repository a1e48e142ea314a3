"""`ls --members`, `cat --member` and `get --member`, against a real front and engine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.cli.outcome import EXITS
from tests.cli.conftest import Program
from tests.front.shard_place import Place, place
from tests.front.test_shards import SAMPLES, packed


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(tmp_path_factory.mktemp("node")) as made:
        for form in ("x.tar", "deflated.zip"):
            made.remote.place(form, packed(form))
        yield made


@pytest.fixture
def forebay(here: Place, tmp_path: Path) -> Program:
    return Program(here.url, tmp_path)


@pytest.mark.parametrize("form", ["x.tar", "deflated.zip"])
def test_members_are_listed(forebay: Program, form: str) -> None:
    wanted = [(name, len(data)) for name, data in SAMPLES]
    assert forebay("ls", "--members", f"remote/{form}").stdout.splitlines() == [f"{s:>10} {n}" for n, s in wanted]
    said = [json.loads(line) for line in forebay("ls", "--members", "--json", f"remote/{form}").stdout.splitlines()]
    assert said == [{"member": name, "size_bytes": size} for name, size in wanted]
    assert "does not exist" in forebay("ls", "--members", "remote/none.tar", code=EXITS["NotFound"]).stderr


def test_a_member_is_written_out(forebay: Program, here: Place, tmp_path: Path) -> None:
    name, data = SAMPLES[41]
    for form in ("x.tar", "deflated.zip"):
        for arguments, wanted in (((), data), (("--range", "5-9"), data[5:10])):
            process = forebay.process("cat", f"remote/{form}", "--member", name, *arguments)
            out, err = process.communicate(timeout=30)
            assert (process.returncode, out) == (0, wanted), err
    forebay("get", "remote/x.tar", str(tmp_path), "--member", name)
    assert (tmp_path / name.rpartition("/")[2]).read_bytes() == data
    forebay("get", "remote/x.tar", str(tmp_path / "named"), "--member", name)
    assert (tmp_path / "named").read_bytes() == data
    assert sorted(os.listdir(tmp_path)) == sorted(["named", name.rpartition("/")[2]]), "no part is left"


def test_what_is_not_there_is_told(forebay: Program, tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"old")
    failed = forebay("get", "remote/x.tar", str(tmp_path / "kept"), "--member", "nothing", code=EXITS["NotFound"])
    assert "no member 'nothing'" in failed.stderr
    process = forebay.process("cat", "remote/x.tar", "--member", "nothing")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (EXITS["NotFound"], b"")
    assert b"no member 'nothing'" in err
    assert (tmp_path / "kept").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["kept"]
    for wrong in (
        ("ls", "--members"),
        ("ls", "--members", "-r", "remote/x.tar"),
        ("get", "-r", "remote/x", "--member", "a"),
    ):
        forebay(*wrong, code=2)
