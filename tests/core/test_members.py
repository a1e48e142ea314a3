"""The index of a shard, against the standard library's tarfile and zipfile."""

from __future__ import annotations

import io
import random
import struct
import subprocess
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.errors import Corrupt, Invalid, NotFound, NotSupported
from forebay.core.formats import members, tar
from forebay.core.formats.members import Form, MemberIndex, form_of
from tests.core.archives import tar_of, zip_of

EXAMPLES = settings(max_examples=60, deadline=None)
ONE = [("a/one.jpg", b"1" * 700), ("a/one.cls", b"7")]


def index_of(kind: str, data: bytes, **more: object) -> MemberIndex:
    def read(start: int, size: int) -> bytes:
        assert start >= 0
        assert size >= 0
        return data[start : start + size]

    return members.build(kind, read, len(data), version="v", etag="e", **more)  # type: ignore[arg-type]


def contents(index: MemberIndex, data: bytes) -> list[tuple[str, bytes]]:
    """Every member's name and bytes, by the index alone."""
    found = []
    for number in range(len(index)):
        member = index.member(number)
        raw = data[member.start : member.end]
        assert len(raw) == member.end - member.start
        if member.method == 8:
            raw = zlib.decompress(raw, -15)
        assert len(raw) == member.size_bytes
        if member.crc32 is not None:
            assert zlib.crc32(raw) == member.crc32
        found.append((member.name, raw))
    return found


def as_tarfile(data: bytes) -> list[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return [(info.name, archive.extractfile(info).read()) for info in archive if info.isreg()]  # type: ignore[union-attr]


names = st.text(st.characters(exclude_characters="\0/\\", exclude_categories=["Cs"]), min_size=1, max_size=60).filter(
    lambda name: name not in (".", "..")
)
paths = st.lists(names, min_size=1, max_size=6).map("/".join)
files = st.lists(st.tuples(paths, st.binary(max_size=1500)), max_size=12)


# --- tar against its oracle ------------------------------------------------------------------------------------------
@EXAMPLES
@given(
    files,
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.sampled_from([600, 65536]),
)
def test_every_tar_that_tarfile_writes_is_read_as_tarfile_reads_it(
    given_files: list[tuple[str, bytes]], form: int, window: int
) -> None:
    try:
        data = tar_of(given_files, format=form)
    except ValueError:
        return  # ustar has no room for the name
    index = index_of("tar", data, window_bytes=window)
    assert contents(index, data) == as_tarfile(data) == given_files
    again = members.decode(index.encode())
    assert contents(again, data) == given_files
    assert again.encode() == index.encode()


@EXAMPLES
@given(files, st.data())
def test_a_tar_that_is_cut_is_found_out_and_never_shorter(
    given_files: list[tuple[str, bytes]], data: st.DataObject
) -> None:
    whole = tar_of([*given_files, ("last", b"x" * 513)], format=tarfile.PAX_FORMAT)
    end = index_of("tar", whole).end
    cut = data.draw(st.integers(0, end - 1))
    try:
        index = index_of("tar", whole[:cut])
    except Corrupt:
        return
    start = index.end
    assert start - cut < 512
    assert start <= cut or whole[cut:start] == bytes(start - cut), "only padding is missing"
    rest = contents(index_of("tar", whole), whole)
    assert contents(index, whole) == rest[: len(index)], "cut between two members: this no reader can see"


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 255))
def test_a_damaged_tar_raises_what_it_should_or_reads(at: int, value: int) -> None:
    raw = bytearray(tar_of(ONE * 2, format=tarfile.GNU_FORMAT))
    raw[at % len(raw)] = value
    try:
        index = index_of("tar", bytes(raw))
    except (Corrupt, NotSupported):
        return
    for number in range(len(index)):
        member = index.member(number)
        assert 0 <= member.start <= member.end <= len(raw)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=3000), st.sampled_from(["tar", "zip"]), st.sampled_from([b"", b"PK\5\6", b"PK\3\4"]))
def test_rubbish_is_no_archive(data: bytes, kind: str, magic: bytes) -> None:
    try:
        index = index_of(kind, magic + data)
    except (Corrupt, NotSupported, Invalid):
        return
    assert len(index) == 0, "a zip's empty directory, or a block of zeros"


def test_what_is_not_a_file_is_no_member_and_links_have_no_bytes() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for type_, size in ((tarfile.DIRTYPE, 0), (tarfile.SYMTYPE, 0), (tarfile.LNKTYPE, 0), (tarfile.FIFOTYPE, 0)):
            info = tarfile.TarInfo(f"type{type_.decode()}")
            info.type, info.size, info.linkname = type_, size, "x" * 150
            archive.addfile(info)
        info = tarfile.TarInfo("file")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    data = out.getvalue()
    assert contents(index_of("tar", data), data) == [("file", b"abc")]


def test_sizes_in_base_256_and_pax_sizes_and_global_headers() -> None:
    def header(name: bytes, size: bytes, type_: bytes = b"0") -> bytes:
        head = bytearray(512)
        head[: len(name)], head[124:136], head[156:157] = name, size.ljust(12, b"\0"), type_
        head[148:156] = b" " * 8
        head[148:156] = b"%06o\0 " % sum(head)
        return bytes(head)

    wide = header(b"wide", bytes([0x80]) + (600).to_bytes(11, "big")) + b"w" * 600 + bytes(424)
    full = header(b"full", b"%012o" % 5) + b"fives" + bytes(507)
    old = header(b"dir/", b"0\0", b"\0") + header(b"old", b" 3 \0", b"\0") + b"old" + bytes(509)
    record = b"16 size=0000005\n"
    pax = header(b"pax", b"%011o\0" % len(record), b"x") + record + bytes(512 - len(record)) + header(b"p", b"0")
    every = b"20 comment=for all\n\n"
    plain = header(b"g", b"%011o\0" % len(every), b"g") + every + bytes(512 - len(every)) + header(b"q", b"1") + b"Q"
    data = wide + full + old + pax + b"12345" + bytes(507) + plain + bytes(511) + tar.END
    expected = [("wide", b"w" * 600), ("full", b"fives"), ("old", b"old"), ("p", b"12345"), ("q", b"Q")]
    assert contents(index_of("tar", data), data) == expected == as_tarfile(data)
    with pytest.raises(Corrupt, match="goes on to"):
        index_of("tar", header(b"x", b"\x80" + b"\xff" * 11))
    with pytest.raises(Corrupt, match="size"):
        index_of("tar", header(b"negative", b"\xff" * 12) + tar.END)


def test_sparse_files_are_refused_whoever_wrote_them(tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.seek(4 << 20)
        file.write(b"end")
    for form in ("gnu", "pax"):
        made = tmp_path / f"{form}.tar"
        command = ["tar", f"--format={form}", "--sparse", "-C", str(tmp_path), "-cf", str(made), "sparse"]
        subprocess.run(command, check=True, timeout=30)
        with pytest.raises(NotSupported, match="sparse"):
            index_of("tar", made.read_bytes())


@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_gnu_tar_writes_what_is_read(tmp_path: Path, form: str) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    wanted = {}
    for number in range(30):
        name = f"deep/{'n' * (number if form in ('v7', 'ustar') else number * 5)}{number}.bin"
        wanted[name] = random.Random(number).randbytes(number * 211)
        (tmp_path / "in" / name).write_bytes(wanted[name])
    made = tmp_path / "made.tar"
    command = ["tar", f"--format={form}", "-C", str(tmp_path / "in"), "-cf", str(made), "deep"]
    subprocess.run(command, check=True, timeout=30)
    data = made.read_bytes()
    assert dict(contents(index_of("tar", data), data)) == wanted


def test_the_last_of_several_counts_and_all_are_listed() -> None:
    data = tar_of([("same", b"first"), ("other", b"x"), ("same", b"second")])
    index = index_of("tar", data)
    assert index.names == ["same", "other", "same"]
    found = index.find("same")
    assert data[found.start : found.end] == b"second"
    assert index.number("nothing") is None
    with pytest.raises(NotFound) as failed:
        index.find("nothing")
    assert failed.value.code == "NoSuchMember"


def test_more_members_than_the_limit_are_refused() -> None:
    data = tar_of([(str(number), b"") for number in range(5)])
    assert len(index_of("tar", data, members_max=5)) == 5
    with pytest.raises(Invalid, match="split it"):
        index_of("tar", data, members_max=4)
    zipped = zip_of([(str(number), b"") for number in range(5)])
    assert len(index_of("zip", zipped, members_max=5)) == 5
    with pytest.raises(Invalid, match="split it"):
        index_of("zip", zipped, members_max=4)


# --- writing one more ------------------------------------------------------------------------------------------------
@EXAMPLES
@given(st.lists(st.tuples(paths, st.binary(max_size=1100)), min_size=1, max_size=6), st.booleans())
def test_what_is_appended_tarfile_reads(given_files: list[tuple[str, bytes]], padded: bool) -> None:
    data = b""
    index = members.empty()
    for name, body in given_files:
        head = tar.header_of(name, len(body), 1_700_000_000.5)
        start = index.end + len(head)
        data = data[: index.end].ljust(index.end, b"\0") + head + body + tar.padding(len(body))
        index = index.appended(name, start, len(body), version="v", etag="e", end=len(data))
        data += tar.END if padded else b""
    assert as_tarfile(data) == given_files
    assert contents(index, data) == given_files
    built = index_of("tar", data)
    assert contents(built, data) == given_files
    assert built.end == index.end


@pytest.mark.parametrize("size", [0, 8**11 - 1, 8**11, 1 << 40])
@pytest.mark.parametrize("name", ["a", "x" * 100, "d/" * 60 + "x", "x" * 101, "ü" * 70, "p" * 155 + "/" + "n" * 100])
def test_headers_of_any_size_and_name_are_read_back(name: str, size: int) -> None:
    head = tar.header_of(name, size, 0)
    with tarfile.open(fileobj=io.BytesIO(head + b"x" * 2048)) as archive:
        info = archive.next()
        assert info is not None
        assert (info.name, info.size) == (name, size)
    for wrong in ("", "a\0b"):
        with pytest.raises(Invalid):
            tar.header_of(wrong, 1, 0)


# --- zip against its oracle ------------------------------------------------------------------------------------------
@EXAMPLES
@given(
    files, st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]), st.binary(max_size=40), st.binary(max_size=99)
)
def test_every_zip_that_zipfile_writes_is_read_as_zipfile_reads_it(
    given_files: list[tuple[str, bytes]], method: int, before: bytes, comment: bytes
) -> None:
    out = io.BytesIO()
    out.write(before)  # a zip behind other bytes
    with zipfile.ZipFile(out, "a", method) as archive:
        for name, data in dict(given_files).items():
            archive.writestr(zipfile.ZipInfo(name), data, method)
        archive.comment = comment
    raw = out.getvalue()
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            expected = [(info.filename, archive.read(info)) for info in archive.infolist() if not info.is_dir()]
    except zipfile.BadZipFile:
        return  # the comment looks like the end of another zip
    index = index_of("zip", raw)
    assert contents(index, raw) == expected
    assert members.decode(index.encode()).encode() == index.encode()


def test_zip64_and_streamed_zips(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        with archive.open("big", "w", force_zip64=True) as member:
            member.write(b"b" * 5000)
        archive.writestr("small", b"s")
    raw = bytearray(out.getvalue())
    assert contents(index_of("zip", bytes(raw)), bytes(raw)) == [("big", b"b" * 5000), ("small", b"s")]

    class Stream(io.RawIOBase):  # cannot seek: sizes come behind the bytes
        def __init__(self) -> None:
            self.data = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data: object) -> int:
            self.data += bytes(data)  # type: ignore[call-overload]
            return len(data)  # type: ignore[arg-type]

    stream = Stream()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:  # type: ignore[arg-type]
        archive.writestr("a/", b"")
        archive.writestr("a/x", b"x" * 4000)
    assert contents(index_of("zip", bytes(stream.data)), bytes(stream.data)) == [("a/x", b"x" * 4000)]


def test_a_directory_of_more_than_65535_entries_uses_zip64() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(66_000):
            archive.writestr(zipfile.ZipInfo(f"{number}"), b"%d" % number)
    raw = out.getvalue()
    index = index_of("zip", raw)
    assert len(index) == 66_000
    found = index.find("65999")
    assert raw[found.start : found.end] == b"65999"
    assert index.sizes(65_998) == [5, 5]


def test_encrypted_and_unknown_members_are_listed_and_refused_when_read() -> None:
    raw = bytearray(zip_of(ONE, zipfile.ZIP_DEFLATED))
    entry = raw.index(b"PK\1\2")
    struct.pack_into("<H", raw, entry + 8, 1)  # encrypted
    second = raw.index(b"PK\1\2", entry + 4)
    struct.pack_into("<H", raw, second + 10, 93)  # zstd
    index = index_of("zip", bytes(raw))
    assert index.names == ["a/one.jpg", "a/one.cls"]
    for number, word in ((0, "encrypted"), (1, "method 93")):
        with pytest.raises(NotSupported, match=word):
            index.member(number).check_readable()


def test_places_beyond_all_bounds_are_corrupt() -> None:
    raw = zip_of([("a", b"a" * 50)])
    entry = raw.index(b"PK\1\2")
    for wide in ((50, 50, 1 << 64), (1 << 64, 50, 0), (50, 1 << 64, 0), (1 << 64, 1 << 64, 1 << 64)):
        damaged = bytearray(raw)
        for at, value in zip((24, 20, 42), wide, strict=True):
            struct.pack_into("<I", damaged, entry + at, min(value, 0xFFFFFFFF))
        many = sum(value > 0xFFFFFFFF for value in wide)
        field = struct.pack("<HH", 1, 8 * many) + b"\xff" * 8 * many
        struct.pack_into("<H", damaged, entry + 30, len(field))
        damaged[entry + 47 : entry + 47] = field
        end = bytes(damaged).rindex(b"PK\5\6")
        struct.pack_into("<I", damaged, end + 12, 47 + len(field))
        with pytest.raises(Corrupt):
            index_of("zip", bytes(damaged))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 255), st.integers(0, 400))
def test_a_damaged_or_cut_zip_raises_what_it_should_or_reads(at: int, value: int, cut: int) -> None:
    raw = bytearray(zip_of(ONE * 1, zipfile.ZIP_DEFLATED) + b"")
    raw[at % len(raw)] = value
    data = bytes(raw[: len(raw) - (cut if cut < 40 else 0)])
    try:
        index = index_of("zip", data)
    except (Corrupt, NotSupported, Invalid):
        return
    for number in range(len(index)):
        member = index.member(number)
        assert 0 <= member.start <= member.end <= len(data)


# --- the index as bytes ----------------------------------------------------------------------------------------------
def test_an_index_that_is_damaged_or_of_another_format_is_refused() -> None:
    raw = index_of("tar", tar_of(ONE)).encode()
    for at in range(len(raw)):
        with pytest.raises(Corrupt):
            len(members.decode(raw[:at]).names)
    assert raw[1] == members.FORMAT
    with pytest.raises(Corrupt, match="format"):
        members.decode(raw[:1] + b"\x02" + raw[2:])


def test_names_that_are_not_utf8_are_carried() -> None:
    data = tar_of([("aé", b"x")], format=tarfile.GNU_FORMAT, encoding="latin-1")
    index = members.decode(index_of("tar", data).encode())
    assert index.names == ["a\udce9"]
    assert index.find("a\udce9").size_bytes == 1


def test_a_file_that_is_no_archive_is_its_one_member() -> None:
    index = index_of("file", b"0123456789", plain=True)
    assert contents(members.decode(index.encode()), b"0123456789") == [(members.WHOLE, b"0123456789")]


def test_forms() -> None:
    assert form_of("a/x.TAR", None) == Form("tar", "")
    assert form_of("x.tar.gz", None) == form_of("x.tgz", b"PK\3\4") == Form("tar", "gzip")
    assert form_of("x.tar.zst", None) == Form("tar", "zstd")
    assert form_of("x.zip", None) == Form("zip", "")
    assert form_of("shard.00000.mds.zstd", None) == form_of("chunk-0-0.zstd.bin", None) == Form("file", "zstd")
    assert form_of("chunk-0-0.bin", None) is None
    assert form_of("x", None) is None
    assert form_of("x", zip_of(ONE)[:512]) == Form("zip", "")
    assert form_of("x", b"\x1f\x8b\x08") == Form("tar", "gzip")
    assert form_of("x", tar_of(ONE)[:512]) == Form("tar", "")
