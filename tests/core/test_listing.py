"""Listings as values: what goes in comes out, ids tell listings apart, and damage is noticed."""

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.errors import Corrupt
from forebay.core.formats.listing import Listing, build, pack
from forebay.core.keyspace import Alphabet, cuts, is_past
from forebay.core.types import ListEntry


def entry(key: str, size: int = 5, etag: str | None = None, modified: float = 7.5) -> ListEntry:
    return ListEntry(key, size, hashlib.md5(key.encode()).hexdigest() if etag is None else etag, modified)


def made(*entries: ListEntry, bucket: str = "b", prefix: str = "") -> Listing:
    return Listing(build(bucket, prefix, [pack(sorted(entries))]))


KEYS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(KEYS, st.tuples(st.integers(0, 2**50), st.text("0123456789abcdef-", max_size=40))), st.randoms())
def test_whatever_the_pieces_every_entry_is_there_once_in_byte_order(objects, chance):
    entries = [ListEntry(key, size, etag, 1.5) for key, (size, etag) in sorted(objects.items())]
    pieces, rest = [], list(entries)
    while rest:
        count = chance.randint(1, 5)
        pieces.append(pack(rest[:count]))
        rest = rest[count:]
    listing = Listing(build("b", "", pieces))
    assert [listing.entry(number) for number in range(len(listing))] == entries
    assert listing.keys() == [one.key for one in entries] == sorted(objects)
    assert [listing.find(one.key) for one in entries] == list(range(len(entries)))
    assert list(listing.sizes) == [one.size_bytes for one in entries]
    chance.shuffle(pieces)  # as ranges that end in any order, or a server with an order of its own
    assert Listing(build("b", "", [*pieces, *pieces[:1]])).id == listing.id


def test_parts_of_a_listing_that_overlap_are_one_and_the_last_word_counts():
    a, b, c, d = (entry(key) for key in "abcd")
    newer = b._replace(size_bytes=9)
    listing = Listing(build("b", "", [pack([a, b, c]), pack([newer, d])]))
    assert [listing.entry(number) for number in range(4)] == [a, newer, c, d]


def test_ids_are_those_of_contents():
    one = made(entry("k/1"), entry("k/2"))
    assert one.id == made(entry("k/1"), entry("k/2")).id
    assert one.id == made(entry("k/1", modified=1.0), entry("k/2")).id, "an object that was flushed is what it was"
    others = [
        made(entry("k/1"), entry("k/2"), bucket="c"),
        made(entry("k/1"), entry("k/2"), prefix="k/"),
        made(entry("k/1", size=6), entry("k/2")),
        made(entry("k/1", etag="0" * 32), entry("k/2")),
        made(entry("k/1", etag=""), entry("k/2")),
        made(entry("k/1", etag="", modified=1.0), entry("k/2")),
        made(entry("k/1"), entry("k/3")),
        made(entry("k/1")),
        made(),
    ]
    assert len({one.id, *(other.id for other in others)}) == len(others) + 1


def test_what_changed_is_said_in_words():
    before = made(*(entry(f"k{n}") for n in range(9)))
    now = made(*(entry(f"k{n}", size=5 + (n == 3)) for n in range(1, 12)))
    changed = before.difference(now)
    assert (changed.added, changed.removed, changed.changed) == (3, 1, 1)
    assert (
        str(changed) == "3 objects were added and 1 object was removed and 1 object was changed (k0, k10, k11, k3, k9)"
    )
    assert str(before.difference(before)) == "nothing changed"


def test_keys_are_found_and_those_that_are_not_there_are_not():
    listing = made(*(entry(f"k/{n:04d}") for n in range(0, 1000, 2)))
    assert listing.find("k/0500") == 250
    assert listing.find("k/0501") is None
    assert listing.find("zzz") is None
    assert listing.keys(10, 12) == ["k/0020", "k/0022"]
    assert listing.keys(400, 10**9) == [f"k/{n:04d}" for n in range(800, 1000, 2)]
    with pytest.raises(IndexError):
        listing.key(500)


@pytest.mark.parametrize("etag", [None, "", "an etag of a file"])
def test_damage_anywhere_is_noticed(etag):
    data = build("bucket", "p/", [pack([entry(f"p/{n}", etag=etag) for n in range(5)])])
    Listing(data)
    with pytest.raises(Corrupt):
        Listing(data[:-1])
    with pytest.raises(Corrupt):
        Listing(data + bytes(8))
    chance, noticed = random.Random(3), 0
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= chance.randint(1, 255)
        try:
            listing = Listing(bad)
        except Corrupt:
            noticed += 1
        else:  # a time is no part of the id where there is an etag, and padding says nothing
            assert [listing.entry(n)[:3] for n in range(5)] == [entry(f"p/{n}", etag=etag)[:3] for n in range(5)]
    assert noticed > len(data) * 0.6


@settings(max_examples=200, deadline=None)
@given(KEYS, st.none() | KEYS, st.sampled_from(["", "a", "a/b"]), st.integers(2, 17), st.lists(KEYS, max_size=5))
def test_cuts_are_within_and_rise(low, high, prefix, parts, seen):
    alphabet = Alphabet()
    alphabet.learn(seen)
    low, high = prefix + low, None if high is None else prefix + high
    found = cuts(low, high, prefix, parts, alphabet)
    assert found == sorted(set(found))
    assert len(found) < parts
    assert all(low < cut and cut.startswith(prefix) and (high is None or cut < high) for cut in found)


def test_a_key_is_past_a_cut_only_when_it_is_so_for_every_server():
    assert is_past("b", "a")
    assert not is_past("a/b", "a.m")  # a server that takes '/' for the lowest character has yet to list `a.m`
    assert not is_past("a.m", "a/b")
