"""The index of a shard: the names of its members, and where the bytes of each are.

Theory. A shard is read one member at a time and at random, so the members' places are found once and kept. A shard has
up to millions of members. The index holds columns (one text of all names, arrays of numbers), not objects, so encoding,
sending and decoding run at memory speed. A dictionary from names to numbers is made when the first name is looked up.

Numbers are 8 bytes, little-endian. A column that would say the same of all members is empty: `packed`, `methods` and
`crcs` where every member is a plain range (each tar, and a zip that only stores).

A member is a regular file of a tar, or a file of a zip. A compressed file that is neither, but is read in ranges
(shards of other libraries), has one member, WHOLE: all of its plain form. Names are the archive's, in UTF-8; other
bytes become surrogates and cannot be named over HTTP. Of several members with one name the last counts, as both formats
have it; all are listed.

Invariants. (1) Every column that is not empty has as many entries as there are names. (2) `decode(encode(index))` is
equal to `index`, column by column. (3) Every place lies inside the shard (or its plain form).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from forebay.core import limits
from forebay.core.errors import Corrupt, NotFound, NotSupported
from forebay.core.formats import tar
from forebay.core.formats.tar import Read
from forebay.core.formats.zipdir import DEFLATED, ENCRYPTED, STORED, ZipScan

Kind = Literal["tar", "zip", "file"]
WHOLE = "plain"  # the one member of a `file`
FORMAT = 1  # of what `encode` makes: another is not read
_SUFFIXES: tuple[tuple[str, Kind, str], ...] = (
    (".tar", "tar", ""),
    (".tar.gz", "tar", "gzip"),
    (".tgz", "tar", "gzip"),
    (".tar.zst", "tar", "zstd"),
    (".tzst", "tar", "zstd"),
    (".zip", "zip", ""),
    (".mds.gz", "file", "gzip"),
    (".mds.zstd", "file", "zstd"),
    (".zstd.bin", "file", "zstd"),
)
_MAGIC: tuple[tuple[bytes, Kind, str], ...] = (
    (b"PK\3\4", "zip", ""),
    (b"PK\5\6", "zip", ""),
    (b"\x1f\x8b", "tar", "gzip"),
    (b"\x28\xb5\x2f\xfd", "tar", "zstd"),
)
SNIFF_BYTES = 512


class Form(NamedTuple):
    """What kind of archive a shard is, and how it is packed as a whole: `gzip`, `zstd` or not at all."""

    kind: Kind
    packing: str


def form_of(key: str, head: bytes | None) -> Form | None:
    """The form of a shard by its key's suffix, else by its first SNIFF_BYTES; None when only they can tell and they are
    not given. `Invalid` never: what is no archive is found out by reading it as a tar."""
    name = key.lower()
    for suffix, kind, packing in _SUFFIXES:
        if name.endswith(suffix):
            return Form(kind, packing)
    if head is None:
        return None
    for magic, kind, packing in _MAGIC:
        if head.startswith(magic):
            return Form(kind, packing)
    return Form("tar", "")


def check_head(form: Form, head: bytes, what: str) -> None:
    """`Corrupt` if what begins with `head` cannot be of that form: found out before all of it is read."""
    if form.kind == "tar" and not form.packing:
        tar.check_head(head)
    elif form.packing and not any(head.startswith(magic) for magic, _, packing in _MAGIC if packing == form.packing):
        raise Corrupt(f"{what} is no {form.packing} file: its name says so, its first bytes do not")


class Member(NamedTuple):
    """One member. Its bytes are [start, end) of the shard, packed by `method` (0: not at all, 8: deflated); read, they
    are `size_bytes`. `crc32` is of these, None where the archive has none."""

    name: str
    start: int
    end: int
    method: int
    size_bytes: int
    crc32: int | None

    def check_readable(self) -> None:
        """`NotSupported` for a way of packing that is not understood."""
        if self.method == ENCRYPTED:
            raise NotSupported(f"the member {self.name!r} is encrypted: get the whole shard and unpack it yourself")
        if self.method not in (STORED, DEFLATED):
            raise NotSupported(
                f"the member {self.name!r} is packed in a way that is not served (method {self.method}): "
                "write the zip stored or deflated, or get the whole shard"
            )


class MembersPage(msgspec.Struct, frozen=True):
    """A page of a shard's members as JSON: (name, size) in the archive's order; `next`: `first` of the next page."""

    bucket: str
    key: str
    version: str
    etag: str
    kind: str
    plain: bool
    count: int
    members: list[tuple[str, int]]
    next: int | None = None


class AppendCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """Make these bytes (`body`, or the temp file `path`, which stays the caller's) one more member of a tar, which is
    made if there is none. `Busy` (`NotHere`): fetch the shard first, then ask again."""

    bucket: str
    key: str
    name: str
    size_bytes: int
    path: str = ""
    body: bytes | None = None
    if_match: str | None = None
    if_none_match: str | None = None


class _Columns(msgspec.Struct, array_like=True, frozen=True):
    """What `encode` makes, and `GET /-/v1/members` answers."""

    format: int
    kind: Kind
    version: str
    etag: str
    size_bytes: int
    plain: bool
    end: int
    count: int
    names: bytes
    offsets: bytes
    sizes: bytes
    packed: bytes = b""
    methods: bytes = b""
    crcs: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Columns).decode


class MemberIndex:
    """See the module's header. `version` and `etag` are the shard's; `size_bytes` is that of the bytes that the places
    lie in: the shard's, or with `plain` those of its plain form. `end`: in a tar, where the next member would go."""

    __slots__ = ("_columns", "_crcs", "_names", "_numbers", "_offsets", "_packed", "_sizes")

    def __init__(self, columns: _Columns) -> None:
        self._columns = columns
        self._names: list[str] | None = None
        self._numbers: dict[str, int] | None = None
        self._offsets = _numbers(columns.offsets, "Q")
        self._sizes = _numbers(columns.sizes, "Q")
        self._packed = _numbers(columns.packed, "Q")
        self._crcs = _numbers(columns.crcs, "I")
        counts = {len(self._offsets), len(self._sizes), columns.count}
        optional = {len(self._packed), len(columns.methods), len(self._crcs)}
        if len(counts) > 1 or not optional <= {0, columns.count} or len(optional) > 1:
            raise Corrupt("the columns of an index of members are not of one length: it is damaged")

    @property
    def kind(self) -> Kind:
        return self._columns.kind

    @property
    def version(self) -> str:
        return self._columns.version

    @property
    def etag(self) -> str:
        return self._columns.etag

    @property
    def size_bytes(self) -> int:
        return self._columns.size_bytes

    @property
    def plain(self) -> bool:
        return self._columns.plain

    @property
    def end(self) -> int:
        return self._columns.end

    def __len__(self) -> int:
        return self._columns.count

    @property
    def names(self) -> list[str]:
        """All names, in the archive's order."""
        if self._names is None:
            text = self._columns.names.decode("utf-8", "surrogateescape")
            self._names = text.split("\0") if len(self) else []
            if len(self._names) != len(self):
                raise Corrupt("an index of members has not as many names as members: it is damaged")
        return self._names

    def member(self, number: int) -> Member:
        """The member at `number`, in the archive's order."""
        name, start, size = self.names[number], self._offsets[number], self._sizes[number]
        if not self._columns.methods:
            return Member(name, start, start + size, STORED, size, None)
        packed, method = self._packed[number], self._columns.methods[number]
        return Member(name, start, start + packed, method, size, self._crcs[number])

    def number(self, name: str) -> int | None:
        """Which member has the name: the last one; None if there is none."""
        if self._numbers is None:
            self._numbers = {name: number for number, name in enumerate(self.names)}
        return self._numbers.get(name)

    def find(self, name: str) -> Member:
        """The member of that name. `NotFound` (`NoSuchMember`)."""
        number = self.number(name)
        if number is None:
            raise NotFound(
                f"the shard has no member {name[:1024]!r}: see what it has with `forebay ls SHARD --members`",
                code="NoSuchMember",
            )
        return self.member(number)

    @property
    def ranged(self) -> bool:
        """Whether every member is a range of the shard."""
        return not self._columns.plain and not self._columns.methods

    @property
    def text(self) -> bytes:
        """All names in the archive's order, in UTF-8, with a zero byte between them."""
        return self._columns.names

    @property
    def places(self) -> tuple[Sequence[int], Sequence[int]]:
        """Where members begin and how long they are, as read: buffers of 8-byte numbers."""
        return self._offsets, self._sizes

    @property
    def methods(self) -> bytes:
        """How members are packed, a byte each; empty where none is."""
        return self._columns.methods

    def place(self, name: str) -> tuple[int, int] | None:
        """Where the member begins and how long it is, of a shard that is `ranged`; None if there is none."""
        number = self.number(name)
        return None if number is None else (self._offsets[number], self._sizes[number])

    def sizes(self, first: int = 0, limit: int | None = None) -> list[int]:
        """Sizes in the archive's order, as they are read."""
        return list(self._sizes[first : None if limit is None else first + limit])

    def encode(self) -> bytes:
        """The index as bytes."""
        return _encode(self._columns)

    def appended(self, name: str, start: int, size_bytes: int, *, version: str, etag: str, end: int) -> MemberIndex:
        """The index of the tar that has one member more, of `version`; its bytes end with the archive's end mark."""
        old = self._columns
        assert old.kind == "tar", "only a tar grows"
        raw = name.encode("utf-8")
        return MemberIndex(
            msgspec.structs.replace(
                old,
                version=version,
                etag=etag,
                size_bytes=end + 1024,
                end=end,
                count=old.count + 1,
                names=old.names + b"\0" + raw if old.count else raw,
                offsets=old.offsets + start.to_bytes(8, "little"),
                sizes=old.sizes + size_bytes.to_bytes(8, "little"),
            )
        )


def decode(data: bytes) -> MemberIndex:
    """What `encode` made. `Corrupt` for anything else, and for another version's format."""
    try:
        columns = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(
            f"an index of members cannot be read ({error}): check that both ends are of one version"
        ) from None
    if columns.format != FORMAT:
        raise Corrupt(f"an index of members has format {columns.format}, this version reads {FORMAT}")
    return MemberIndex(columns)


def build(
    kind: Kind,
    read: Read,
    size_bytes: int,
    *,
    version: str,
    etag: str,
    plain: bool = False,
    window_bytes: int = 65536,
    members_max: int = limits.MEMBERS_MAX,
    until: int | None = None,
) -> MemberIndex:
    """Read an archive of `size_bytes` through `read(start, size)`; of a tar only the members whose headers begin before
    byte `until`, and one header more. `Corrupt` saying where it is damaged or cut,
    `NotSupported` for what cannot be a range (sparse files) or be had (several files), `Invalid` (`TooManyMembers`)."""
    if kind == "tar":
        scan = tar.TarScan(read, size_bytes, members_max=members_max, window_bytes=window_bytes)
        scan.run(until)
        places = (len(scan.names), b"\0".join(scan.names), _bytes(scan.offsets), _bytes(scan.sizes))
        return MemberIndex(_Columns(FORMAT, kind, version, etag, size_bytes, plain, scan.end, *places))
    if kind == "file":
        places = (1, WHOLE.encode(), bytes(8), size_bytes.to_bytes(8, "little"))
        return MemberIndex(_Columns(FORMAT, kind, version, etag, size_bytes, plain, 0, *places))
    zipped = ZipScan(read, size_bytes, members_max=members_max)
    zipped.run()
    places = (len(zipped.names), b"\0".join(zipped.names), _bytes(zipped.offsets), _bytes(zipped.sizes))
    packing: tuple[bytes, ...] = ()
    if any(zipped.methods):
        packing = (_bytes(zipped.packed), bytes(zipped.methods), _bytes(zipped.crcs))
    return MemberIndex(_Columns(FORMAT, kind, version, etag, size_bytes, plain, 0, *places, *packing))


def of_ranges(
    names: Sequence[str], offsets: array[int], sizes: array[int], size_bytes: int, *, etag: str
) -> MemberIndex:
    """The index of a tar of which somebody else says where the members are: `offsets` and `sizes` are of 8 bytes."""
    places = (len(names), "\0".join(names).encode("utf-8", "surrogateescape"), _bytes(offsets), _bytes(sizes))
    return MemberIndex(_Columns(FORMAT, "tar", "", etag, size_bytes, False, 0, *places))


def empty(version: str = "", etag: str = "") -> MemberIndex:
    """The index of a tar without members."""
    return MemberIndex(_Columns(FORMAT, "tar", version, etag, 0, False, 0, 0, b"", b"", b""))


def _bytes(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _numbers(column: bytes, code: str) -> Sequence[int]:
    if len(column) % array(code).itemsize:
        raise Corrupt("a column of an index of members is cut: it is damaged")
    if sys.byteorder == "little":
        return memoryview(column).cast(code)  # type: ignore[call-overload,no-any-return]
    numbers = array(code, column)
    numbers.byteswap()
    return numbers
