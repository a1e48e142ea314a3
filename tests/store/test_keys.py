"""Index keys: unique, in listing order, within LMDB's limit; and scans that mend the order of very long ones."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core import limits
from forebay.core.record import Record, encode_record
from forebay.node.store.disk import index, keys

# long keys that share long beginnings are the hard case: build keys from a few long pieces
_piece = st.sampled_from(["a", "b", "é", "\U0001f600", "\x00", "/", "x" * 240, "y" * 250, "\U0010ffff", " "])
_key = (
    st.lists(_piece, min_size=1, max_size=5).map("".join).filter(lambda key: len(key.encode()) <= limits.KEY_BYTES_MAX)
)
_bucket = st.sampled_from(["aaa", "aab", "a-a", "a.a", "aaa-long-bucket-name"])


@given(_bucket, _key)
def test_a_key_fits_lmdb_and_comes_back(bucket: str, key: str) -> None:
    entry = keys.index_key(bucket, key)
    assert len(entry) <= limits.INDEX_KEY_BYTES_MAX
    assert keys.split(entry, keys.record_key(bucket, key)) == (bucket, key)
    assert keys.is_hashed(entry) == bool(keys.record_key(bucket, key))


@given(st.lists(st.tuples(_bucket, _key), min_size=2, max_size=6, unique=True))
def test_order_of_entries_is_order_of_keys_outside_a_group(names: list[tuple[str, str]]) -> None:
    assert len({keys.index_key(*name) for name in names}) == len(names)
    for one, other in itertools.combinations(names, 2):
        raw = [f"{bucket}\0{key}".encode() for bucket, key in (one, other)]
        if raw[0][: keys.STEM_BYTES] == raw[1][: keys.STEM_BYTES]:
            continue  # one group: a scan sorts it
        assert (keys.index_key(*one) < keys.index_key(*other)) == (raw[0] < raw[1])


@pytest.fixture(scope="module")
def lister(tmp_path_factory: pytest.TempPathFactory) -> index.Index:
    path: Path = tmp_path_factory.mktemp("index")
    return index.Index(str(path), write=True)


def _fill(lister: index.Index, names: set[tuple[str, str]]) -> None:
    for entry, _ in lister.walk("records"):
        lister.put("records", entry, None)
    for bucket, key in names:
        record = Record(1, len(key), "v", "e", 1.0, 1.0, b"", True, key=keys.record_key(bucket, key))
        lister.put("records", keys.index_key(bucket, key), encode_record(record))
    lister.flush()


@settings(max_examples=150, deadline=None)
@given(
    st.sets(st.tuples(_bucket, _key), max_size=25),
    _bucket,
    st.one_of(st.just(""), _key),
    st.one_of(st.just(""), _key),
    st.integers(1, 7),
)
def test_a_scan_is_a_sorted_filtered_page(
    lister: index.Index, names: set[tuple[str, str]], bucket: str, prefix: str, after: str, limit: int
) -> None:
    _fill(lister, names)
    wanted = sorted(
        (key for b, key in names if b == bucket and key.startswith(prefix) and key.encode() > after.encode()),
        key=str.encode,
    )
    page = index.scan_entries(lister, bucket, prefix, after, limit)
    assert [entry.key for entry in page] == wanted[:limit]
    assert [entry.size_bytes for entry in page] == [len(key) for key in wanted[:limit]]
    assert [key for key, _ in index.scan_records(lister, bucket, prefix, after, limit)] == wanted[:limit]


def test_pages_of_a_big_group_join_without_gap_or_repeat(lister: index.Index) -> None:
    names = {("aaa", "s" * 600 + f"{number:04d}") for number in range(500)}
    names |= {("aaa", "s" * 495 + chr(97 + number)) for number in range(10)}  # short members of the same group
    _fill(lister, names)
    seen: list[str] = []
    while page := index.scan_entries(lister, "aaa", "", seen[-1] if seen else "", 33):
        seen += [entry.key for entry in page]
    assert seen == sorted(key for _, key in names)
