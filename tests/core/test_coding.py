"""Erasure coding decides: what a range needs, where slices lie, what is to be moved. Each against a dumb oracle."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.access import VERBS, WHOLE, Identity, parse_grants
from forebay.core.cluster.coding import (
    K_MAX,
    M_MAX,
    Code,
    Entry,
    Shown,
    choose,
    code_of,
    decode_entry,
    encode_entry,
    entries_of,
    hidden_of,
    moves,
    slice_name,
    spans,
    split_slice,
    whose_entries,
)
from forebay.core.errors import Invalid, Unavailable
from forebay.core.types import Bucket, check_bucket_name
from forebay.node.peer_key import identity_of_peers

codes = st.builds(Code, st.integers(2, K_MAX), st.integers(1, M_MAX))


def entry_of(size_bytes: int, code: Code, cell_bytes: int, places: tuple[str, ...] = ()) -> Entry:
    return Entry("etag", size_bytes, 1.5, "gen", k=code.k, m=code.m, cell_bytes=cell_bytes, places=places)


@given(codes, st.integers(1, 9), st.integers(1, 2000), st.data())
def test_spans_name_every_byte_of_a_range_once(
    code: Code, cell_bytes: int, size_bytes: int, data: st.DataObject
) -> None:
    """The oracle cuts the object as the theory says, byte by byte."""
    entry = entry_of(size_bytes, code, cell_bytes)
    at = []
    for group in range(entry.groups):
        length = entry.slice_bytes(group)
        assert length <= cell_bytes
        assert (code.k - 1) * length < entry.group_bytes(group) + code.k, "zeros are fewer than cells"
        at += [(group, byte // length, byte % length) for byte in range(entry.group_bytes(group))]
    assert len(at) == size_bytes
    start = data.draw(st.integers(0, size_bytes))
    end = data.draw(st.integers(start, size_bytes))
    named = [
        (span.group, span.number, byte) for span in spans(entry, start, end) for byte in range(span.start, span.end)
    ]
    assert named == at[start:end]


@given(
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters='"'), max_size=40),
    st.integers(0, 1 << 50),
    st.integers(0, 1 << 42),
    st.integers(0, 99),
    st.booleans(),
)
def test_what_an_etag_says_is_read_back(etag: str, size_bytes: int, millis: int, revision: int, small: bool) -> None:
    body = b"" if small else None
    entry = Entry(etag, size_bytes, millis / 1000, "c0ffee", revision, body=body, k=2, m=1, places=("a", "b", "c"))
    assert Shown.of(entry.shown().text()) == Shown(etag, size_bytes, millis / 1000, "c0ffee", revision, not small)
    assert decode_entry(encode_entry(entry), "bucket/key") == entry


@pytest.mark.parametrize("text", ["", "etag", "a.1.2.g.3.x", "a.x.2.g.3.s", "a.1.2.g.-3.s", "a.1.2.3.s"])
def test_the_etag_of_a_stranger_is_no_entry(text: str) -> None:
    with pytest.raises(Invalid, match="somebody else wrote"):
        Shown.of(text)


@pytest.mark.parametrize("data", [b"", b"{}", encode_entry(Entry("e", 9, 0.0, "g", k=2, m=1, places=("a",)))])
def test_what_is_no_entry_is_refused(data: bytes) -> None:
    with pytest.raises(Invalid, match="write"):
        decode_entry(data, "bucket/key")


def test_names_are_read_back_and_no_client_has_them() -> None:
    assert split_slice(slice_name("c0ffee", 70_000, 11)) == ("c0ffee", 70_000, 11)
    assert [split_slice(name) for name in ("", "x", "a/b/c", "a/1")] == [None] * 4
    assert whose_entries(entries_of("corpus")) == "corpus"
    assert whose_entries("corpus") == ""
    with pytest.raises(Invalid):
        check_bucket_name(entries_of("corpus"))


@pytest.mark.parametrize("name", ["-slices", "-entries-corpus"])
def test_who_may_do_everything_does_not_reach_what_only_nodes_name(name: str) -> None:
    for grants in ("admin:*", "read:*,write:*,create:*", "admin:*slices", "admin:*-corpus"):
        somebody = Identity("somebody", grants=parse_grants(grants))
        assert somebody.reach("read", "corpus") == WHOLE or "corpus" in grants or "slices" in grants
        for verb in VERBS:
            assert somebody.reach(verb, name) == (), grants
            assert not somebody.sees(name)
    nodes = identity_of_peers("0" * 64)
    assert nodes.reach("write", name) == nodes.reach("read", name) == nodes.reach("read", "corpus") == WHOLE


def test_a_url_names_a_code() -> None:
    assert code_of("coded://4+2") == Code(4, 2)
    assert code_of("s3://coded") is None
    for wrong in (
        "coded://",
        "coded://4",
        "coded://4+0",
        "coded://1+1",
        "coded://17+2",
        "coded://4+5",
        "coded://4+2/x",
    ):
        with pytest.raises(Invalid, match=r"coded://K\+M"):
            code_of(wrong)
    hidden = hidden_of(Bucket("corpus", "coded://4+2", write="back", copies=2))
    assert hidden is not None
    assert (hidden.write, hidden.copies) == ("local", 3), "as many may be lost as of its slices"
    assert hidden_of(Bucket("corpus", "s3://corpus")) is None


nodes = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.floats(1, 100), min_size=1, max_size=24)


@given(codes, nodes, st.text(min_size=1, max_size=9))
def test_no_node_has_more_than_may_be_lost(code: Code, weights: dict[str, float], generation: str) -> None:
    if len(weights) * code.m < code.slices:
        with pytest.raises(Unavailable, match="stays on two nodes"):
            choose(generation, code, weights)
        return
    places = choose(generation, code, weights)
    assert len(places) == code.slices
    most = max(Counter(places).values())
    assert most <= code.m
    assert most == -(-code.slices // len(weights)), "as even as can be"


@settings(max_examples=300)
@given(codes, nodes, st.randoms(use_true_random=False))
def test_moves_mend_what_is_wrong_and_nothing_else(
    code: Code, weights: dict[str, float], chance: random.Random
) -> None:
    """Places that may be anything: nodes that take slices, that are lost, that leave, that are waited for."""
    lost, leaving, away = ({f"{kind}{number}" for number in range(3)} for kind in ("lost", "leaving", "away"))
    pool = [*weights, *weights, *lost, *leaving, *away]
    places = tuple(chance.choice(pool) for _ in range(code.slices))
    entry = entry_of(1000, code, 7, places)
    found = moves(entry, weights, frozenset(lost), frozenset(leaving))
    now = [found.get(number, place) for number, place in enumerate(places)]
    share = -(-code.slices // len(weights))
    counts = Counter(place for place in now if place in weights)
    assert set(found.values()) <= weights.keys()
    assert not set(now) & lost
    for number, place in enumerate(places):
        assert number not in found or place not in away, "who is waited for keeps its slices"
    assert moves(entry_of(1000, code, 7, tuple(now)), weights, frozenset(lost), frozenset(leaving)) == {}, "at once"
    if share > code.m:
        assert all(places[number] in lost for number in found), "too few nodes: only what is lost moves"
        return
    assert not set(now) & leaving
    assert max(counts.values(), default=0) <= share
    over = Counter(place for place in places if place in weights)
    for number in found:
        assert places[number] not in weights or over[places[number]] > share, "it might have stayed"
    kept = Counter(places[number] for number in range(code.slices) if number not in found)
    for node, count in over.items():
        assert kept[node] >= min(count, share), "no more leave a node than must"


def test_without_nodes_nothing_moves() -> None:
    assert moves(entry_of(10, Code(2, 1), 7, ("a", "b", "c")), {}, frozenset("a"), frozenset()) == {}


def test_a_leave_moves_its_own_slices_alone() -> None:
    """Rendezvous: of a thousand objects, only those with a slice at the node that goes."""
    weights = {f"node-{number}": 1.0 for number in range(12)}
    rest = {node: weight for node, weight in weights.items() if node != "node-3"}
    moved = 0
    for number in range(1000):
        entry = entry_of(10, Code(4, 2), 7, choose(f"gen-{number}", Code(4, 2), weights))
        found = moves(entry, rest, frozenset(), frozenset({"node-3"}))
        assert all(entry.places[number] == "node-3" for number in found)
        moved += len(found)
    assert 400 < moved < 600, "six in twelve of a thousand"
