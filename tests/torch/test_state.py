"""A state is small, means one dataset only, and says what changed."""

from __future__ import annotations

import json
import pickle

import msgspec
import pytest

from forebay.core.errors import Invalid, Precondition
from forebay.core.formats.listing import Listing, build, pack
from forebay.core.types import ListEntry
from forebay.torch.columns import Fingerprint, ListingColumns
from forebay.torch.state import STATE_BYTES_MAX, State, from_dict

Entry = tuple[str, int, str]


def listing(entries: list[Entry]) -> Listing:
    return Listing(build("corpus", "", [pack([ListEntry(key, size, etag, 1.0) for key, size, etag in entries])]))


def columns(entries: list[Entry], *suffixes: str) -> ListingColumns:
    return ListingColumns.of(listing(entries), suffixes)


def entries(count: int) -> list[Entry]:
    return [(f"train/{number:05d}.jpg", 100 + number, f"{number:032x}") for number in range(count)]


def difference(before: list[Entry], after: list[Entry]) -> str:
    saved = columns(before).fingerprint("objects", len(before))
    now = columns(after)
    return now.difference(saved, now.fingerprint("objects", len(after)))


def test_a_listing_keeps_what_it_was_given():
    given = [("b", 0, ""), ("c/日本", 1 << 40, '"odd"'), ("ä", 1, "x")]
    found = columns(given)
    assert [(found.key(n), int(found.sizes[n]), found.etag(n)) for n in range(3)] == given
    again = pickle.loads(pickle.dumps(found))
    assert again.fingerprint("objects", 3) == found.fingerprint("objects", 3)


def test_suffixes_choose_and_folder_marks_are_left_out():
    mixed = [("a.JPG", 1, "1"), ("b.json", 2, "22"), ("b/", 0, ""), ("c.jpg", 3, ""), ("d.jpg", 4, "4"), ("g", 5, "5")]
    mixed.sort()
    assert [columns(mixed, ".jpg").key(n) for n in range(3)] == ["a.JPG", "c.jpg", "d.jpg"]
    assert [columns(mixed, ".jpg").etag(n) for n in range(3)] == ["1", "", "4"]
    assert columns(mixed, ".jpg", ".json").objects == 4
    assert columns(mixed).objects == 5
    assert columns(mixed, ".png").objects == 0
    assert columns([], ".png").objects == 0


def test_what_was_chosen_is_the_same_however_it_was_found():
    only = [entry for entry in entries(50) if entry[0].endswith("7.jpg")]
    chosen, all_of_it = (found.fingerprint("x", 5) for found in (columns(entries(50), "7.jpg"), columns(only)))
    assert (chosen.id, chosen.rungs, chosen.size_bytes) == (all_of_it.id, all_of_it.rungs, all_of_it.size_bytes)


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 1000])
def test_nothing_changed(count: int):
    assert difference(entries(count), entries(count)) == ""


def test_a_changed_object_is_found_to_a_sixteenth():
    changed = entries(1600)
    changed[837] = (changed[837][0], changed[837][1], "f" * 32)
    assert difference(entries(1600), changed) == (
        "the first key that differs lies between 'train/00800.jpg' and 'train/00899.jpg'"
    )


def test_a_changed_object_of_few_is_named():
    changed = entries(10)
    changed[4] = ("train/00004.jpg", 999, changed[4][2])
    said = difference(entries(10), changed)
    assert "'train/00004.jpg' is not what was there" in said
    assert "bytes: 1045 then, 1940 now" in said


def test_added_and_removed_objects():
    assert "keys were added from 'train/00100.jpg' on" in difference(entries(100), entries(110))
    said = difference(entries(110), entries(100))
    assert "objects: 110 then, 100 now" in said
    assert "everything up to" in said or "lies between" in said
    missing = entries(160)
    del missing[72]
    assert "between 'train/00070.jpg' and 'train/00080.jpg'" in difference(entries(160), missing)
    assert "all objects are gone" in difference(entries(3), [])


def test_an_object_renamed_and_one_that_moved_its_boundary_are_changes():
    assert difference([("ab", 1, "x"), ("c", 1, "y")], [("a", 1, "x"), ("bc", 1, "y")]) != ""
    assert difference([("a", 1, "xy"), ("b", 1, "z")], [("a", 1, "x"), ("b", 1, "yz")]) != ""


def test_a_state_is_small_and_comes_back():
    found = columns([(f"{'k' * 900}{n}", 1 << 45, "e" * 60) for n in range(50)])
    now = found.fingerprint("windows of 4097 every 4096 uint16, over files, after 1024 bytes, shuffled", 1 << 61)
    state = State(1, (1 << 63) - 1, 10**9, 1 << 60, now)
    text = json.dumps(state.to_dict())
    assert state.to_dict()["fingerprint"]["manifest"] == now.listing_id, "as states called it that were saved long ago"
    assert len(text) < STATE_BYTES_MAX
    assert from_dict(json.loads(text), found, now) == state


def test_a_state_of_another_dataset_is_refused_and_says_why():
    before, after = columns(entries(20)), columns(entries(21))
    state = State(1, 0, 3, 7, before.fingerprint("objects, shuffled", 20)).to_dict()
    with pytest.raises(Precondition, match=r"objects: 20 then, 21 now.*added from.*set_epoch\(4\)"):
        from_dict(state, after, after.fingerprint("objects, shuffled", 21))
    with pytest.raises(Precondition, match="read as 'objects, shuffled' and is now 'objects, in order'"):
        from_dict(state, before, before.fingerprint("objects, in order", 20))


def test_what_is_no_state_is_refused():
    found = columns(entries(3))
    now = found.fingerprint("objects", 3)
    good = State(1, 0, 0, 0, now).to_dict()
    for bad in ({}, {**good, "samples": "x"}, {**good, "samples": 4}, {**good, "epoch": -1}, {**good, "samples": -1}):
        with pytest.raises(Invalid):
            from_dict(bad, found, now)
    with pytest.raises(Invalid, match="version 2"):
        from_dict({**good, "version": 2}, found, now)
    assert isinstance(msgspec.convert(good["fingerprint"], Fingerprint), Fingerprint)
