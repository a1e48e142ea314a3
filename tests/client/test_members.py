"""Members of shards by the client's two drivers, told by a real front and engine."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay import aio
from forebay.client.members import MembersCache
from forebay.core.errors import Corrupt, Invalid, NotFound, NotSupported, Precondition
from forebay.core.types import RangeSpec
from tests.core.archives import tar_of
from tests.front.shard_place import Place, place
from tests.front.test_shards import SAMPLES, packed


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(tmp_path_factory.mktemp("node")) as made:
        yield made


@pytest.fixture
def client(here: Place) -> Iterator[forebay.Client]:
    with forebay.connect(here.url) as made:
        yield made


@pytest.mark.parametrize("form", ["x.tar", "x.tgz", "deflated.zip"])
def test_members_are_listed_found_and_read(here: Place, client: forebay.Client, form: str) -> None:
    here.remote.place(form, packed(form))
    members = client.members("remote", form)
    assert list(members) == [(name, len(data)) for name, data in SAMPLES]
    assert len(members) == len(SAMPLES)
    name, data = SAMPLES[50]
    assert name in members
    assert "nothing" not in members
    assert 7 not in members
    assert client.get("remote", form, member=name) == data
    assert client.get("remote", form, member=name, etag=members.etag, range=RangeSpec(3, 9)) == data[3:10]
    start, end, method = members.find(name)
    if not members.plain and not method:
        assert client.get("remote", form, range=RangeSpec(start, end - 1), etag=members.etag) == data
    assert members.plain == (form == "x.tgz")
    assert client.members("remote", form) is members, "confirmed, not sent again"
    with pytest.raises(NotFound, match="has no member") as failed:
        members.find("nothing")
    assert failed.value.code == "NoSuchMember"
    with pytest.raises(NotFound) as failed:
        client.get("remote", form, member="nothing")
    assert failed.value.code == "NoSuchMember"
    with pytest.raises(Invalid):
        client.get("remote", form, member="")


def test_what_is_no_shard_says_so(here: Place, client: forebay.Client) -> None:
    here.remote.place("notes.txt", b"no archive " * 200)
    with pytest.raises(Corrupt, match="no tar header at byte 0"):
        client.members("remote", "notes.txt")
    with pytest.raises(NotFound):
        client.members("remote", "none.tar")


def test_appending_as_bytes_as_a_file_and_as_a_stream(client: forebay.Client, tmp_path: Path) -> None:
    (tmp_path / "two").write_bytes(b"2" * 30_000)
    first = client.append_member("local", "grown.tar", "one", b"1", only_new=True)
    before = client.members("local", "grown.tar")
    assert before.etag == first.etag
    client.append_member("local", "grown.tar", "two", tmp_path / "two", etag=first.etag)
    client.append_member("local", "grown.tar", "three", io.BytesIO(b"3"))
    assert client.members("local", "grown.tar").names == ["one", "two", "three"]
    assert before.names == ["one"], "what was given out stays what it was"
    with tarfile.open(fileobj=io.BytesIO(client.get("local", "grown.tar"))) as archive:
        assert archive.getnames() == ["one", "two", "three"]
    with pytest.raises(Precondition):
        client.append_member("local", "grown.tar", "four", b"4", etag=first.etag)
    with pytest.raises(Precondition):
        client.append_member("local", "grown.tar", "four", b"4", only_new=True)
    with pytest.raises(NotSupported):
        client.append_member("remote", "grown.tar", "four", b"4")
    with pytest.raises(Invalid):
        client.append_member("local", "grown.tar", "", b"4")


def test_a_new_version_is_noticed(here: Place, client: forebay.Client) -> None:
    client.put("local", "again.tar", tar_of([("a", b"1")]))
    assert client.members("local", "again.tar").names == ["a"]
    client.put("local", "again.tar", tar_of([("b", b"22")]))
    assert list(client.members("local", "again.tar")) == [("b", 2)]


def test_the_same_without_blocking(here: Place) -> None:
    here.remote.place("aio.tar", tar_of(SAMPLES))

    async def story() -> None:
        async with aio.connect(here.url) as client:
            members = await client.members("remote", "aio.tar")
            assert await client.members("remote", "aio.tar") is members
            name, data = SAMPLES[33]
            assert await client.get("remote", "aio.tar", member=name) == data
            await client.append_member("local", "aio.tar", "x", data)
            assert list(await client.members("local", "aio.tar")) == [("x", len(data))]

    asyncio.run(story())


def test_what_is_kept_is_bounded_by_members(client: forebay.Client) -> None:
    kept = MembersCache(members_max=5)
    for number in range(4):
        client.put("local", f"k{number}.tar", tar_of([(f"{n}", b"") for n in range(2)]))
        client.run(kept.read("local", f"k{number}.tar"))
    assert len(kept) == 2
    client.put("local", "large.tar", tar_of([(f"{n}", b"") for n in range(20)]))
    assert len(client.run(kept.read("local", "large.tar"))) == 20
    assert len(kept) == 1
