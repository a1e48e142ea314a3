"""Names of samples' parts, the cut into shards, and the index, held against tarfile and a dumb cut."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.errors import Corrupt, Invalid
from forebay.core.formats import samples, tar


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jpg", ("a", "jpg")),
        ("x/y/a.seg.png", ("x/y/a", "seg.png")),
        ("x.d/a.jpg", ("x.d/a", "jpg")),
        ("a", None),
        (".hidden", None),
        ("x.d/a", None),
        ("a.", None),
        ("new\nline.txt", ("new\nline", "txt")),
    ],
)
def test_a_name_is_a_key_and_an_extension(name: str, expected: tuple[str, str] | None) -> None:
    assert samples.split(name) == expected


@given(st.text(max_size=12), st.text(max_size=5))
def test_what_is_joined_is_read_back(key: str, extension: str) -> None:
    try:
        name = samples.joined(key, extension)
    except Invalid:
        return
    assert samples.split(name) == (key, extension)
    with tarfile.open(fileobj=io.BytesIO(tar.header_of(name, 0, 0) + tar.END)) as opened:
        assert opened.getnames() == [name]


@pytest.mark.parametrize("name", [("a.b", "jpg"), ("a/", "jpg"), ("", "jpg"), ("a", "x/y"), ("a", ""), ("a\0", "jpg")])
def test_a_name_that_would_be_read_otherwise_is_refused(name: tuple[str, str]) -> None:
    with pytest.raises(Invalid, match=r"reader|hold"):
        samples.joined(*name)


def test_a_name_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(Invalid, match="hold"):
        samples.joined("a\udcff", "jpg")


@given(st.lists(st.integers(1, 9).map(lambda blocks: 512 * blocks), max_size=40), st.integers(1, 5) | st.none())
def test_the_cut_is_the_dumb_one(sizes: list[int], samples_max: int | None) -> None:
    room = 512 * 9 + 1024
    expected: list[list[int]] = []
    for size in sizes:
        last = expected[-1] if expected else []
        if not last or len(last) == samples_max or sum(last) + size + 1024 > room:
            expected.append([])
        expected[-1].append(size)
    cut, found = samples.Cut(room, samples_max), [[]] if sizes else []
    for size in sizes:
        if not cut.fits("key", size):
            cut.begin()
            found.append([])
        cut.add(size)
        found[-1].append(size)
    assert found == expected


def test_a_sample_larger_than_a_shard_is_refused() -> None:
    with pytest.raises(Invalid, match=r"'big' takes 1\.0 KiB.*larger shards"):
        samples.Cut(2047).fits("big", 1024)
    with pytest.raises(Invalid, match="at least 1"):
        samples.Cut(2048, 0)


def test_parts_of_a_sample_are_told_apart() -> None:
    samples.check_parts("a", ["jpg", "cls"])
    with pytest.raises(Invalid, match="'JPG' and 'jpg'"):
        samples.check_parts("a", ["JPG", "jpg"])
    with pytest.raises(Invalid, match="no parts"):
        samples.check_parts("a", [])


def test_the_index_is_read_back_and_other_things_are_none() -> None:
    shards = [samples.Shard("shard-000000.tar", 3, 4096), samples.Shard("shard-000001.tar", 1, 2048)]
    data = samples.encode_index(shards)
    assert samples.decode_index(data) == shards
    assert b"wids-shard-index-v1" in data
    assert samples.decode_index(b'{"shardlist": [{"url": "x/a.tar", "nsamples": 5, "md5sum": ""}]}') == [
        samples.Shard("x/a.tar", 5)
    ]
    for other in (b"{}", b"[]", b"not json", b'{"shardlist": 3}'):
        assert samples.decode_index(other) is None
    with pytest.raises(Corrupt, match="remove"):
        samples.decode_unfinished(b"[", "s3://b/x")
