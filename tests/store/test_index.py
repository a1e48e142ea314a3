"""The index: group commit, a map that grows, an environment shared in one process, and damage that is noticed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay.core.errors import Bug, Corrupt
from forebay.node.store.disk.index import Index


def test_pending_changes_are_seen_by_the_writer_and_by_readers_after_the_flush(tmp_path: Path) -> None:
    writer, reader = Index(str(tmp_path), write=True), Index(str(tmp_path))
    writer.put("records", b"a", b"1")
    writer.put("records", b"b", b"2")
    writer.put("records", b"b", b"3")
    assert (writer.get("records", b"b"), reader.get("records", b"b"), writer.pending) == (b"3", None, 2)
    assert writer.flush() == 2
    assert (reader.get("records", b"b"), writer.pending, writer.flush()) == (b"3", 0, 0)
    writer.put("records", b"a", None)
    assert (writer.get("records", b"a"), reader.get("records", b"a")) == (None, b"1")
    writer.discard()
    assert writer.get("records", b"a") == b"1"
    reader.close()
    assert writer.get("records", b"a") == b"1", "the writer's environment outlives a reader's use of it"
    writer.close()


def test_a_full_map_grows_and_no_change_is_lost(tmp_path: Path) -> None:
    index = Index(str(tmp_path), write=True, map_bytes=1 << 20)
    for number in range(3000):
        index.put("records", b"%05d" % number, bytes(1024))
    assert index.flush() == 3000
    assert sum(1 for _ in index.walk("records")) == index.count("records") == 3000
    index.close()


def test_a_walk_meets_what_changes_on_its_way(tmp_path: Path) -> None:
    index = Index(str(tmp_path), write=True)
    for number in range(10):
        index.put("records", b"%d" % number, b"x")
    index.flush()
    seen = []
    for key, _ in index.walk("records", b"2", batch=2):
        seen.append(key)
        if key == b"3":
            index.put("records", b"5", None)
            index.flush()
    assert seen == [b"2", b"3", b"4", b"6", b"7", b"8", b"9"]
    index.close()


def test_a_reader_first_and_a_writer_then_in_one_process_is_refused(tmp_path: Path) -> None:
    Index(str(tmp_path), write=True).close()
    reader = Index(str(tmp_path))
    with pytest.raises(Bug, match="open the Store before its readers"):
        Index(str(tmp_path), write=True)
    reader.close()
    Index(str(tmp_path), write=True).close()


@pytest.mark.parametrize("length", [1, 4096, 8192, 20_000, 300_000])
def test_a_cut_index_is_an_error_and_never_a_crash(tmp_path: Path, length: int) -> None:
    index = Index(str(tmp_path), write=True)
    for number in range(3000):
        index.put("records", b"%05d" % number, bytes(1024))
    index.flush()
    index.close()
    os.truncate(tmp_path / "data.mdb", length)
    with pytest.raises(Corrupt):
        Index(str(tmp_path), write=True)


def test_a_garbage_index_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(os.urandom(100_000))
    with pytest.raises(Corrupt):
        Index(str(tmp_path), write=True)
