"""Samples are made of the members of a shard as `split` reads their names, whatever the names are."""

from __future__ import annotations

import zipfile
from array import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.core.errors import Corrupt
from forebay.core.formats.members import MemberIndex, decode, of_ranges
from forebay.core.formats.samples import split
from forebay.torch import layouts
from forebay.torch.layouts import lay_out
from tests.core.archives import zip_of
from tests.torch.memory_source import MemorySource

Sample = tuple[str, list[tuple[str, int, int]]]  # its key; extension, offset and size of each part


def index_of(names: Sequence[str], offsets: Sequence[int] | None = None) -> MemberIndex:
    offsets = [512 + 1024 * number for number in range(len(names))] if offsets is None else offsets
    sizes = [number % 5 for number in range(len(names))]
    return decode(of_ranges(names, array("Q", offsets), array("Q", sizes), 1 << 40, etag="e").encode())


def one_by_one(
    index: MemberIndex, parts: Sequence[str] = (), keep: Callable[[str], bool] | None = None
) -> list[Sample]:
    """The oracle: a dictionary of dictionaries, filled name by name."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    for number in range(len(index)):
        member = index.member(number)
        named = split(member.name)
        if named and (not parts or named[1].lower() in parts):
            samples.setdefault(named[0], {})[named[1]] = member.start, member.size_bytes
    return [
        (key, sorted(((extension, *place) for extension, place in found.items()), key=lambda part: part[1:]))
        for key, found in samples.items()
        if keep is None or keep(key)
    ]


def laid_out(
    index: MemberIndex, parts: Sequence[str] = (), keep: Callable[[str], bool] | None = None
) -> tuple[list[Sample], bool]:
    layout = lay_out(index, parts, keep)
    found = [
        (
            layout.key(sample),
            [
                (layout.extensions[layout.kinds[member]], layout.offsets[member], layout.sizes[member])
                for member in layout.members(sample)
            ],
        )
        for sample in range(layout.samples)
    ]
    return found, layout.plain


LETTERS = st.text("ab./ü\udc80", max_size=12)
KEYS = st.sampled_from(["a", "b", "d/a", "d.e/a", "a-key-of-16-byte", "a-key-of-16-bytf", "b-key-of-16-byte", "ü"])
EXTENSIONS = st.sampled_from(["jpg", "JPG", "cls", "seg.png", "eightlet", "nineletterz", "nineletterx", "x" * 40])
USUAL = st.builds("{}.{}".format, KEYS, EXTENSIONS)


@given(st.lists(LETTERS | USUAL, max_size=40), st.randoms(use_true_random=False))
@example([], None)
@example([""], None)
@example(["", ""], None)
@example(["a.jpg", "b.jpg", "a.cls", "a.jpg"], None)  # not neighbours, and one of them twice
@example(["/.jpg", ".jpg", "a.", "a/", "a/b", "a.b/c", "a..b", "./a.b"], None)
def test_layouts_say_what_reading_name_by_name_says(names: list[str], random: object):
    offsets = [512 + 1024 * number for number in range(len(names))]
    if random is not None:
        random.shuffle(offsets)  # type: ignore[attr-defined]
    index = index_of(names, offsets)
    assert laid_out(index) == (one_by_one(index), True)
    assert laid_out(index, ("jpg", "seg.png"))[0] == one_by_one(index, ("jpg", "seg.png"))

    def short(key: str) -> bool:
        return len(key) < 3

    assert laid_out(index, ("cls", "jpg"), short)[0] == one_by_one(index, ("cls", "jpg"), short)


def test_a_packed_member_makes_a_shard_that_is_asked_by_names():
    packed = zip_of([("a.txt", b"x" * 4000), ("b.txt", b"y")], zipfile.ZIP_DEFLATED)
    index = MemorySource({"s.zip": packed}).members("b-1", "s.zip", "")
    assert laid_out(index) == (one_by_one(index), False)
    assert laid_out(index, ("nothing",)) == ([], True)


def test_a_number_where_the_extension_goes_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layouts, "EXTENSIONS_MAX", 100)
    assert lay_out(index_of([f"frame.{number}" for number in range(100)])).samples == 1
    with pytest.raises(Corrupt, match=r"101 different extensions.*000017\.jpg"):
        lay_out(index_of([f"frame.{number}" for number in range(101)]))
