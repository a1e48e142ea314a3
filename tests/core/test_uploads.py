"""Uploads as decisions: names of parts, what Complete accepts, entity tags and checksums, pages of listings."""

from __future__ import annotations

import base64
import hashlib
import zlib

import pytest
import xxhash
from awscrt import checksums as crt
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core import limits
from forebay.core.errors import ForebayError, Invalid
from forebay.core.machines import uploads
from forebay.core.machines.uploads import Part
from forebay.core.s3rules.checksums import Checksum

MIB = 1 << 20
MD5S = st.binary(min_size=16, max_size=16).map(bytes.hex)


def part(number: int, size_bytes: int = 5 * MIB, text: bytes = b"", **more: object) -> Part:
    return Part(number, number, size_bytes, hashlib.md5(text or b"%d" % number).hexdigest(), 1.5)._replace(**more)


def book(*parts: Part) -> dict[int, Part]:
    return {each.number: each for each in parts}


def asked(*parts: Part) -> list[uploads.AskedPart]:
    return [(each.number, each.md5, {}) for each in parts]


def code(call: object, *arguments: object) -> str:
    with pytest.raises(ForebayError) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value.code


# --- names -----------------------------------------------------------------------------------------------------------
@given(
    st.integers(1, limits.PARTS_MAX),
    st.integers(1, 2**40),
    st.integers(0, limits.PUT_BYTES_MAX),
    MD5S,
    st.integers(0, 2**42),
    st.sampled_from(["", *uploads.ALGORITHMS]),
    st.binary(min_size=64, max_size=64),
)
@settings(max_examples=100, deadline=None)
def test_a_name_says_what_the_part_is(number, seq, size_bytes, md5, modified_ms, algorithm, digest):
    checksum = base64.b64encode(digest[: uploads.DIGEST_BYTES[algorithm]]).decode() if algorithm else ""
    made = Part(number, seq, size_bytes, md5, modified_ms / 1000, algorithm, checksum)
    name = uploads.name_of(made)
    assert uploads.parse_name(name) == made
    assert len(name) <= 230
    assert name.isascii()
    assert "/" not in name


@pytest.mark.parametrize("name", ["", "new-1", "00001", "00001-1-1-1-xyz--", f"00001-1-1-1-{'a' * 32}-CRC32-", ".."])
def test_other_names_are_no_parts(name):
    assert uploads.parse_name(name) is None


def test_of_two_files_of_one_number_the_later_counts():
    old, new, other = part(1, seq=3), part(1, seq=9), part(2, seq=4)
    assert uploads.latest([new, other, old]) == ({1: new, 2: other}, [old])


# --- completing ------------------------------------------------------------------------------------------------------
def test_parts_may_be_left_out_and_numbers_skipped():
    parts = book(part(1), part(7), part(8), part(10_000, 3))
    chosen = uploads.choose(parts, asked(parts[7], parts[10_000]), "", "", None)
    assert [each.number for each in chosen] == [7, 10_000]


def test_what_complete_refuses():
    small, big, last = part(1, 5 * MIB - 1), part(2), part(3, 1)
    parts = book(small, big, last)
    assert code(uploads.choose, parts, [], "", "", None) == "MalformedXML"
    assert code(uploads.choose, parts, asked(big, small), "", "", None) == "InvalidPartOrder"
    assert code(uploads.choose, parts, asked(big, big), "", "", None) == "InvalidPartOrder"
    assert code(uploads.choose, parts, asked(small, big), "", "", None) == "EntityTooSmall"
    assert code(uploads.choose, parts, asked(big, part(4)), "", "", None) == "InvalidPart"
    assert code(uploads.choose, parts, [(2, "0" * 32, {})], "", "", None) == "InvalidPart"
    assert code(uploads.choose, parts, asked(big, last), "", "", 7) == "InvalidRequest"
    assert uploads.choose(parts, asked(big, last), "", "", 5 * MIB + 1) == [big, last]


def test_an_etag_may_be_quoted_or_left_to_us():
    parts = book(part(1))
    assert uploads.choose(parts, [(1, f'"{parts[1].md5.upper()}"', {})], "", "", None)
    assert uploads.choose(parts, [(1, "", {})], "", "", None)


def test_a_composite_checksum_is_repeated_for_each_part():
    one = part(1, algorithm="SHA256", checksum=base64.b64encode(bytes(32)).decode())
    parts = book(one)
    assert code(uploads.choose, parts, asked(one), "SHA256", "COMPOSITE", None) == "InvalidRequest"
    assert code(uploads.choose, parts, [(1, one.md5, {"SHA256": "bad"})], "SHA256", "COMPOSITE", None) == "InvalidPart"
    assert uploads.choose(parts, [(1, one.md5, {"SHA256": one.checksum})], "SHA256", "COMPOSITE", None) == [one]


def test_the_entity_tag_is_the_one_that_clients_compute():
    texts = [b"a" * 10, b"b" * 20, b""]
    md5s = [hashlib.md5(text).hexdigest() for text in texts]
    expected = hashlib.md5(b"".join(hashlib.md5(text).digest() for text in texts)).hexdigest() + "-3"
    assert uploads.etag_of(md5s) == expected


def test_a_repeated_complete_is_known_by_its_parts():
    one, two = part(1), part(2)
    etag = uploads.etag_of([one.md5, two.md5])
    assert uploads.same_request(asked(one, two), etag)
    assert uploads.same_request([(1, "", {}), (2, two.md5, {})], etag)
    assert not uploads.same_request(asked(one), etag)
    assert not uploads.same_request([(1, "", {})], etag)
    assert not uploads.same_request([(1, "not hex", {}), (2, "zz", {})], etag)


# --- checksums -------------------------------------------------------------------------------------------------------
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=6), st.sampled_from(["CRC32", "CRC32C", "CRC64NVME"]))
@settings(max_examples=60, deadline=None)
def test_crcs_of_parts_make_the_crc_of_the_object(pieces, algorithm):
    parts = [part(n, len(data), algorithm=algorithm, checksum=of(algorithm, data)) for n, data in enumerate(pieces, 1)]
    assert uploads.checksum_of(algorithm, "FULL_OBJECT", parts) == of(algorithm, b"".join(pieces))


def of(algorithm: str, data: bytes) -> str:
    """The checksum, computed another way than in the module."""
    digest = {
        "CRC32": lambda: zlib.crc32(data).to_bytes(4, "big"),
        "CRC32C": lambda: crt.crc32c(data).to_bytes(4, "big"),
        "CRC64NVME": lambda: crt.crc64nvme(data).to_bytes(8, "big"),
        "SHA1": lambda: hashlib.sha1(data).digest(),
        "SHA256": lambda: hashlib.sha256(data).digest(),
        "SHA512": lambda: hashlib.sha512(data).digest(),
        "MD5": lambda: hashlib.md5(data).digest(),
        "XXHASH64": lambda: xxhash.xxh64_digest(data),
        "XXHASH3": lambda: xxhash.xxh3_64_digest(data),
        "XXHASH128": lambda: xxhash.xxh3_128_digest(data),
    }[algorithm]()
    return base64.b64encode(digest).decode()


@pytest.mark.parametrize("algorithm", uploads.ALGORITHMS)
def test_a_digest_takes_bytes_in_pieces(algorithm):
    digest = Checksum(algorithm)
    for piece in (b"ab", b"", memoryview(b"cd")):
        digest.update(piece)
    assert digest.base64() == of(algorithm, b"abcd")


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "SHA1", "SHA256", "MD5", "XXHASH3"])
def test_a_composite_checksum_is_that_of_the_parts_checksums(algorithm):
    pieces = [b"first", b"second"]
    parts = [part(n, len(data), algorithm=algorithm, checksum=of(algorithm, data)) for n, data in enumerate(pieces, 1)]
    raw = b"".join(base64.b64decode(of(algorithm, data)) for data in pieces)
    assert uploads.checksum_of(algorithm, "COMPOSITE", parts) == of(algorithm, raw) + "-2"
    assert uploads.checksum_of(algorithm, "COMPOSITE", [*parts, part(3)]) == "", "a part without one"


def test_which_types_go_with_which_algorithms():
    assert uploads.settle_checksum("", "") == ("", "")
    assert uploads.settle_checksum("crc32", "") == ("CRC32", "COMPOSITE")
    assert uploads.settle_checksum("CRC64NVME", "") == ("CRC64NVME", "FULL_OBJECT")
    assert uploads.settle_checksum("CRC32C", "full_object") == ("CRC32C", "FULL_OBJECT")
    for bad in [("", "COMPOSITE"), ("MD4", ""), ("SHA1", "FULL_OBJECT"), ("CRC64NVME", "COMPOSITE"), ("CRC32", "HALF")]:
        with pytest.raises(Invalid):
            uploads.settle_checksum(*bad)


def test_a_part_keeps_the_checksum_that_its_upload_asks_for():
    assert uploads.pick_checksum("CRC32", {"CRC32": "x"}) == ("CRC32", "x")
    assert uploads.pick_checksum("CRC32", {}) == ("", ""), "to be computed"
    assert uploads.pick_checksum("", {"SHA1": "y"}) == ("SHA1", "y")
    assert code(uploads.pick_checksum, "CRC32", {"SHA1": "y"}) == "InvalidRequest"


def test_a_promised_checksum_is_compared():
    value = of("CRC32", b"x")
    uploads.check_form({}, "", "")
    uploads.check_form({"CRC32": value}, "CRC32", "FULL_OBJECT")
    uploads.check_form({"CRC32": value + "-2"}, "CRC32", "COMPOSITE")
    assert code(uploads.check_form, {"CRC32": "bad"}, "CRC32", "FULL_OBJECT") == "BadDigest"
    assert code(uploads.check_form, {"CRC32": value + "-2"}, "CRC32", "FULL_OBJECT") == "InvalidRequest"
    assert code(uploads.check_form, {"SHA1": value}, "CRC32", "FULL_OBJECT") == "InvalidRequest"
    assert code(uploads.check_form, {"CRC32": value}, "", "") == "InvalidRequest"
    uploads.check_promised({}, "")
    uploads.check_promised({"CRC32": value}, value)
    uploads.check_promised({"CRC32": value}, value + "-2")
    uploads.check_promised({"CRC32": value + "-2"}, value + "-2")
    differs = of("CRC32", b"y")
    assert code(uploads.check_promised, {"CRC32": differs}, value) == "BadDigest"
    assert code(uploads.check_promised, {"CRC32": value + "-3"}, value + "-2") == "BadDigest"


def test_parts_have_numbers_and_sizes_that_s3_takes():
    uploads.check_part(1, 0)
    uploads.check_part(10_000, limits.PUT_BYTES_MAX)
    assert code(uploads.check_part, 0, 1) == "InvalidArgument"
    assert code(uploads.check_part, 10_001, 1) == "InvalidArgument"
    assert code(uploads.check_part, 1, limits.PUT_BYTES_MAX + 1) == "EntityTooLarge"


# --- reading parts ---------------------------------------------------------------------------------------------------
@given(st.lists(st.sampled_from([5, 7, 7, 7, 9]), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_where_each_part_lies_is_known_from_the_sizes(sizes):
    text, start = uploads.sizes_text(sizes), 0
    for number, size in enumerate(sizes, 1):
        assert uploads.part_range(text, number) == (start, start + size, len(sizes))
        start += size
    assert code(uploads.part_range, text, len(sizes) + 1) == "InvalidPartNumber"


def test_sizes_that_would_fill_a_header_are_not_kept():
    assert uploads.sizes_text([5 * MIB] * 9_999 + [17]) == "5242880*9999,17"
    assert uploads.sizes_text(list(range(1, 2000))) == ""


# --- listing ---------------------------------------------------------------------------------------------------------
KEYS = st.sampled_from(["a", "a/", "a/b", "a/c", "ab", "b", "ü", "\U0001f600"])


@given(
    st.lists(st.tuples(KEYS, st.sampled_from(["1", "2", "3"])), unique=True, max_size=12),
    st.sampled_from(["", "a", "a/", "z"]),
    st.integers(1, 5),
)
@settings(max_examples=80, deadline=None)
def test_following_the_markers_shows_every_upload_once(names, prefix, limit):
    names.sort()
    seen: list[tuple[str, str]] = []
    after_key = after_id = ""
    while True:
        page, more = uploads.page_of(names, prefix, after_key, after_id, limit)
        seen += page
        if not more:
            break
        after_key, after_id = page[-1]
    assert seen == [name for name in names if name[0].startswith(prefix)]


def test_a_marker_without_an_id_passes_over_its_key():
    names = [("a", "1"), ("a", "2"), ("b", "1")]
    assert uploads.page_of(names, "", "a", "", 10) == ([("b", "1")], False)
    assert uploads.page_of(names, "", "a", "1", 10) == ([("a", "2"), ("b", "1")], False)
