"""Objects as files: what is asked for while one is read, what becomes of one that is written."""

from __future__ import annotations

import gc
import io
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.client import files
from forebay.client.files import ObjectReader, ObjectWriter
from forebay.client.sync import Client
from forebay.core.errors import Busy, Invalid, NotFound, Precondition, Unavailable
from forebay.core.messages.doorwire import DoorAt
from tests.client.conftest import in_child
from tests.client.fake_door import FakeDoor
from tests.client.fake_node import FakeNode

DATA = random.Random(2).randbytes(3_000_000)
MIB = 1 << 20


@pytest.fixture
def data(node: FakeNode) -> bytes:
    node.objects["corpus"]["a"] = DATA
    return DATA


@pytest.fixture
def front(node: FakeNode, tmp_path: Path) -> Iterator[FakeDoor]:
    """A door beside the node."""
    with FakeDoor(tmp_path) as door:
        node.door = DoorAt("n1", str(door.path))
        yield door


def gets(node: FakeNode) -> list[str]:
    """The ranges of the GETs of objects, in order; "" for a whole object."""
    return [
        headers.get("range", "").removeprefix("bytes=")
        for verb, target, headers in node.seen
        if verb == "GET" and "/objects/" in target
    ]


# --- reading ---------------------------------------------------------------------------------------------------------
def test_a_file_that_is_read_from_end_to_end_is_one_get(node: FakeNode, client: Client, data: bytes) -> None:
    with client.open("corpus", "a") as file:
        assert (file.size, file.etag, file.name) == (len(data), node.etag("corpus", "a"), "corpus/a")
        assert file.readable()
        assert file.seekable()
        assert not file.writable()
        pieces = []
        while piece := file.read(100_000):
            pieces.append(piece)
        assert b"".join(pieces) == data
        assert {len(piece) for piece in pieces} == {100_000}
        assert file.read(1) == b""
        assert file.readinto(bytearray(5)) == 0
    assert gets(node) == [""]
    assert node.connections == 1, "and its connection serves the next"
    assert file.closed
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_a_seek_asks_for_what_is_read_and_no_more(node: FakeNode, client: Client, data: bytes) -> None:
    with client.open("corpus", "a") as file:
        assert file.seek(-8, os.SEEK_END) == len(data) - 8
        assert file.read() == data[-8:]
        file.seek(1_000_000)
        assert file.read(1000) == data[1_000_000:1_001_000]
        assert gets(node) == ["2999992-2999999", "1000000-1000999"]
        assert file.tell() == 1_001_000
        assert file.read(1000) == data[1_001_000:1_002_000], "read on: now it is worth a GET that stays"
        file.seek(100_000, os.SEEK_CUR)
        assert file.read(10) == data[1_102_000:1_102_010], "a short way is read, not asked for"
        assert gets(node)[2:] == ["1001000-"]
        file.seek(5)
        assert file.read(5) == data[5:10]
        assert gets(node)[3:] == ["5-9"]
        file.seek(len(data) + 10)
        assert file.read(5) == b""
        with pytest.raises(Invalid, match="before the object"):
            file.seek(-1)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20_100), st.integers(0, 9000), st.booleans()), max_size=8))
def test_wherever_it_is_read_the_bytes_are_those_of_a_local_file(steps: list[tuple[int, int, bool]]) -> None:
    with FakeNode() as node, Client(node.url) as client:
        node.objects["corpus"]["a"] = DATA[:20_000]
        local, file = io.BytesIO(DATA[:20_000]), client.open("corpus", "a")
        for offset, size, stay in steps:
            if not stay:
                assert file.seek(offset) == local.seek(offset)
            assert file.read(size) == local.read(size)
            assert file.tell() == local.tell()
        file.close()


def test_buffered_and_in_the_hands_of_others(node: FakeNode, client: Client) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for number in range(20):
            archive.writestr(f"m{number}", DATA[number : number + 1000])
    node.objects["corpus"]["z"] = packed.getvalue()
    node.objects["corpus"]["t"] = b"one\ntwo\nthree\n"
    with zipfile.ZipFile(client.open("corpus", "z")) as archive:
        assert archive.read("m7") == DATA[7:1007]
    node.seen.clear()
    with client.open("corpus", "t", buffering=4096) as file:
        assert isinstance(file, io.BufferedReader)
        assert [*io.TextIOWrapper(file)] == ["one\n", "two\n", "three\n"]
    assert gets(node) == [""]


def test_an_empty_object_and_none(node: FakeNode, client: Client) -> None:
    node.objects["corpus"]["empty"] = b""
    with client.open("corpus", "empty") as file:
        assert (file.size, file.read(), file.readall()) == (0, b"", b"")
    assert gets(node) == []
    with pytest.raises(NotFound):
        client.open("corpus", "nothing")
    with pytest.raises(Invalid, match="TextIOWrapper"):
        client.open("corpus", "empty", "r")  # type: ignore[call-overload]


def test_an_object_that_changes_fails_the_read(node: FakeNode, client: Client, data: bytes) -> None:
    file = client.open("corpus", "a", etag=node.etag("corpus", "a"))
    assert file.read(10) == data[:10]
    other = client.open("corpus", "a")
    node.objects["corpus"]["a"] = b"x" * len(data)
    with pytest.raises(Precondition):
        other.read(10)
    file.seek(2_000_000)
    with pytest.raises(Precondition):
        file.read(10)
    with pytest.raises(Precondition, match="open it again"):
        client.open("corpus", "a", etag="old")
    node.no_etag = True
    nameless = client.open("corpus", "a")
    node.objects["corpus"]["a"] = b"shorter"
    with pytest.raises(Precondition):
        nameless.read(10)


def test_an_answer_that_was_cut_is_asked_for_once_more(node: FakeNode, client: Client, data: bytes) -> None:
    """The node ends answers whose readers rest, and a front may be restarted."""
    node.cut_after = 1_000_000
    with client.open("corpus", "a") as file:
        assert file.read(500_000) == data[:500_000]
        node.cut_after = None
        assert file.read(1_000_000) == data[500_000:1_500_000], "over the cut"
        assert gets(node) == ["", "1000000-"]
    node.cut_after = 0
    with client.open("corpus", "a") as file, pytest.raises(Unavailable, match="cut at offset 0"):
        file.read(10)
    with client.open("corpus", "a") as file:
        file.seek(1000)
        with pytest.raises(Unavailable):
            file.read(10)


def test_a_reader_travels_as_a_pickle(node: FakeNode, client: Client, data: bytes) -> None:
    file = client.open("corpus", "a")
    file.read(100)
    again = pickle.loads(pickle.dumps(file))
    assert isinstance(again, ObjectReader)
    assert (again.tell(), again.size, again.etag) == (100, file.size, file.etag)
    assert again.read(100) == data[100:200]
    assert file.read(100) == data[100:200], "the first goes on"
    file.close()
    assert pickle.loads(pickle.dumps(file)).closed
    again.close()
    again._client.close()
    program = "import pickle, sys; print(len(pickle.load(sys.stdin.buffer).read(50)))"
    other = client.open("corpus", "a")
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(other), capture_output=True, check=True)
    assert done.stdout == b"50\n"


def test_a_forked_child_reads_on_by_itself(client: Client, data: bytes) -> None:
    with client.open("corpus", "a") as file:
        assert file.read(1000) == data[:1000]
        assert in_child(lambda: file.read(1000) == data[1000:2000] and file.read() == data[2000:])
        assert file.read() == data[1000:], "its own connection was left alone"


def test_on_the_nodes_host_no_bytes_are_sent(node: FakeNode, client: Client, front: FakeDoor, tmp_path: Path) -> None:
    front.put("corpus", "a", DATA, tmp_path)
    front.small["corpus", "s"] = b"small"
    with client.open("corpus", "a") as file:
        assert file.read(1000) == DATA[:1000]
        file.seek(2_000_000)
        room = bytearray(5000)
        assert file.readinto(room) == 5000
        assert room == DATA[2_000_000:2_005_000]
        assert file.readall() == DATA[2_005_000:]
        assert in_child(lambda: file.seek(5) == 5 and file.read(5) == DATA[5:10])
        again = pickle.loads(pickle.dumps(file))
        again.seek(0)
        assert again.readall() == DATA
        again._client.close()
    with client.open("corpus", "s") as file:
        assert (file.read(2), file.read(), file.size) == (b"sm", b"all", 5)
        file.seek(1)
        assert file.readinto(room) == 4
    assert gets(node) == []
    assert node.requests("HEAD") == []
    assert len(front.asked) <= 5, "once for each process and client, and for what is small"


def test_a_door_that_closes_while_a_file_is_read(
    node: FakeNode, client: Client, front: FakeDoor, tmp_path: Path
) -> None:
    node.objects["corpus"]["a"] = DATA
    front.put("corpus", "a", DATA, tmp_path)
    etag = client.door.find("corpus", "a")
    assert etag is not None
    with client.open("corpus", "a") as file:
        file.etag = node.etag("corpus", "a")  # as it is with a real node: one ETag, however it is asked
        client.door._files["corpus", "a"].etag = file.etag
        assert file.read(1000) == DATA[:1000]
        client.door.off()
        assert file.read(1000) == DATA[1000:2000]
        assert file.read() == DATA[2000:]
    assert gets(node) == ["1000-"]


# --- writing ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [0, 5, files.SPOOL_BYTES, files.SPOOL_BYTES + 1, 20 * MIB])
def test_what_is_written_becomes_the_object_when_it_is_closed(node: FakeNode, client: Client, size: int) -> None:
    data = (DATA * (size // len(DATA) + 1))[:size]
    with client.open("corpus", "new", "wb", content_type="text/plain", metadata={"step": "7"}) as file:
        assert isinstance(file, ObjectWriter)
        assert file.writable()
        for at in range(0, size, 1_000_003):
            file.write(data[at : at + 1_000_003])
        assert file.tell() == size
        assert "new" not in node.objects["corpus"]
    assert node.objects["corpus"]["new"] == data
    assert file.written is not None
    assert file.written.etag == node.etag("corpus", "new")
    assert node.headers["corpus", "new"]["content-type"] == "text/plain"
    assert node.headers["corpus", "new"]["x-amz-meta-step"] == "7"
    assert len(node.requests("PUT")) == 1
    file.close()
    assert len(node.requests("PUT")) == 1, "twice is fine"
    with pytest.raises(ValueError, match="closed"):
        file.write(b"more")


@pytest.mark.parametrize("size", [10, files.SPOOL_BYTES + 10])
def test_what_fails_on_the_way_writes_nothing(node: FakeNode, client: Client, size: int) -> None:
    node.objects["corpus"]["a"] = b"before"

    def fail() -> None:
        with client.open("corpus", "a", "wb") as file:
            file.write(bytes(size))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    file = client.open("corpus", "a", "wb")
    file.write(bytes(size))
    file.abort()
    lost = client.open("corpus", "a", "wb")
    lost.write(bytes(size))
    del lost
    gc.collect()
    assert node.requests("PUT") == []
    node.refuse_body = Busy("full")
    node.fail_next = [Busy("full")] if size < MIB else []
    failing = client.open("corpus", "a", "wb")
    failing.write(bytes(size))
    with pytest.raises(Busy):
        failing.close()
    assert failing.closed
    assert node.objects["corpus"]["a"] == b"before"


def test_only_a_new_one_or_only_over_that_version(node: FakeNode, client: Client, data: bytes) -> None:
    file = client.open("corpus", "a", "xb")
    file.write(b"mine")
    with pytest.raises(Precondition):
        file.close()
    with client.open("corpus", "b", "xb") as file:
        file.write(b"mine")
    with client.open("corpus", "a", "wb", etag=node.etag("corpus", "a")) as file:
        file.write(b"next")
    assert (node.objects["corpus"]["a"], node.objects["corpus"]["b"]) == (b"next", b"mine")
    assert data


def test_a_forked_child_cannot_write_for_its_parent(node: FakeNode, client: Client) -> None:
    file = client.open("corpus", "new", "wb")
    file.write(b"parent")

    def child() -> bool:
        with pytest.raises(Invalid, match="another process"):
            file.close()
        return True

    assert in_child(child)
    file.close()
    assert node.objects["corpus"]["new"] == b"parent"


def test_a_change_by_this_client_is_seen_by_its_door(client: Client, front: FakeDoor, tmp_path: Path) -> None:
    front.put("corpus", "a", DATA, tmp_path)
    for change in (
        lambda: client.put("corpus", "a", b"new"),
        lambda: client.copy("corpus", "a", "corpus", "a"),
        lambda: client.delete("corpus", "a"),
        lambda: client.open("corpus", "a", "wb").close(),
    ):
        assert client.door.pread("corpus", "a", 0, 5) == DATA[:5]
        assert client.door.files_open == 1
        change()
        assert client.door.files_open == 0


def test_a_client_travels_as_a_pickle(node: FakeNode, data: bytes) -> None:
    with Client(node.url, token="secret", patience_s=9) as client:
        with pickle.loads(pickle.dumps(client)) as again:
            assert again.url == client.url
            assert again.get("corpus", "a") == data
    assert node.seen[-1][2]["authorization"] == "Bearer secret"
    with pytest.raises(TypeError, match="ca"):
        pickle.dumps(Client(node.url, trust=lambda: None))  # type: ignore[arg-type,return-value]
