"""Readers' tables in memory: a frozen disk stops no look-up, and no two openers have different tables."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.node.store.disk import reader_tables
from forebay.node.store.disk.index import Index
from tests.disks import Disk, disk
from tests.patience import PATIENCE_S

__all__ = ["disk"]

READ = (
    "import sys; from forebay.node.store.disk.index import Index; i = Index(sys.argv[1]); print(i.get('records', b'a'))"
)


def filled(path: Path) -> Index:
    path.mkdir(exist_ok=True)
    index = Index(str(path), write=True)
    index.put("records", b"a", b"1")
    index.flush()
    return index


def other_process(path: Path) -> str:
    return subprocess.run([sys.executable, "-c", READ, str(path)], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in memory's place."""
    path = tmp_path / "memory"
    path.mkdir()
    monkeypatch.setattr(reader_tables, "MEMORY_DIR", str(path))
    return path


def tables(memory: Path) -> list[str]:
    return [each.name for each in memory.glob("forebay-*/*")]


def test_a_look_up_does_not_wait_for_a_disk_that_takes_no_writes(disk: Callable[[str], Disk]) -> None:
    frozen = disk("a")
    index = filled(frozen.path / "index")
    index.sync()
    os.sync()
    found: list[bytes | None] = []

    def look() -> None:
        found.append(index.get("records", b"a"))  # in this process, and newly opened in another
        found.append(other_process(frozen.path / "index").encode())

    with frozen.frozen():
        looking = threading.Thread(target=look)
        looking.start()
        looking.join(PATIENCE_S)
        in_time = list(found)
    looking.join()
    assert in_time == [b"1", b"b'1'\n"]
    index.close()


def test_whoever_opens_an_index_finds_the_same_table_and_the_last_removes_it(tmp_path: Path, memory: Path) -> None:
    index = filled(tmp_path / "index")
    (name,) = tables(memory)
    assert reader_tables.place(str(tmp_path / "index")).endswith(name)
    assert reader_tables.is_in_memory(str(tmp_path / "index"))
    assert other_process(tmp_path / "index") == "b'1'\n"
    assert tables(memory) == [name], "one who leaves takes nothing from who stays"
    index.close()
    assert tables(memory) == []
    reader = Index(str(tmp_path / "index"))
    assert tables(memory) == [name], "made again, by whoever comes first"
    reader.close()


def test_a_copied_volume_has_a_table_of_its_own(tmp_path: Path, memory: Path) -> None:
    index = filled(tmp_path / "index")
    subprocess.run(["cp", "-a", str(tmp_path / "index"), str(tmp_path / "copy")], check=True)
    copy = filled(tmp_path / "copy")
    assert len(tables(memory)) == 2
    copy.close()
    index.close()


def test_without_memory_the_table_is_on_the_volume_and_says_so(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = filled(tmp_path / "index")
    index.close()

    def full(*arguments: object) -> None:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        index = filled(tmp_path / "new")
        assert not reader_tables.is_in_memory(str(tmp_path / "new"))
        assert (tmp_path / "new" / "lock.mdb").is_file()
        index.close()
    memory.rename(tmp_path / "away")
    index = filled(tmp_path / "index")
    assert not reader_tables.is_in_memory(str(tmp_path / "index")), "a link that leads nowhere is given up"
    assert other_process(tmp_path / "index") == "b'1'\n"
    index.close()


def test_a_table_that_somebody_uses_stays_where_it_is(tmp_path: Path, memory: Path) -> None:
    memory.rename(tmp_path / "away")
    index = filled(tmp_path / "index")
    reading = subprocess.Popen(
        [sys.executable, "-c", READ + "; print('open', flush=True); input()", str(tmp_path / "index")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reading.stdout is not None
    while reading.stdout.readline() != "open\n":
        assert reading.poll() is None
    index.close()
    (tmp_path / "away").rename(memory)
    index = filled(tmp_path / "index")
    assert not reader_tables.is_in_memory(str(tmp_path / "index")), "the reader would not be seen by this writer"
    reading.communicate("\n")
    index.close()
    index = filled(tmp_path / "index")
    assert reader_tables.is_in_memory(str(tmp_path / "index"))
    index.close()
