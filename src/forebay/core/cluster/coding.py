"""Erasure coding of large objects over the nodes: what lies where, what is read for a range, and what is to be moved.

Theory. A bucket at `coded://K+M` has no backend outside the cluster. Its objects are cut into *groups* of K cells. Each
group is coded into K+M *slices* of one cell each, K with the bytes themselves and M computed from them, and any K of
them give back the group. Slices of one object with the same number lie on one node, its *place*. So the object outlives
the loss of M places, and takes (K+M)/K of its size.

What an object is stands in its *entry*: a small object of its own, in a bucket of its own, which is local and kept on
M+1 nodes. Whoever replaces the entry replaces the object. So everything that holds for local objects (one home for each
key, conditions, take-over, hand-over) holds for coded ones, and slices need none of it: they are named after a
*generation* that is drawn for each write, never change, and are nobody's until an entry names them. What is small is in
the entry itself.

A listing of entries shows their ETags, and those say all that a listing of the bucket has to say (`Shown`).

Entries and slices lie in buckets that no client can name, since bucket names do not begin with `-`.

*Places.* The nodes are ranked by the generation, as homes are by the key, and take the slices in turn. No node takes
more than M slices of an object, since the loss of one node must lose nothing: with fewer nodes than that needs, nothing
is coded. `moves` says what is to be moved later: from nodes that are lost, or leave, or have more than their share
since others came.

Rejected: slices as ordinary objects with homes (two of one object would meet on a node whenever the map changes);
coding before the acknowledgement (K+M nodes would have to sync each write, where two do); one cell per object (to code
an object would take as much memory as it has bytes).

Invariants. (1) `Shown.of` undoes `Shown.text`. (2) The spans of a range are in order, do not overlap and cover it.
(3) A choice of places, and what `moves` makes of one, has at most M slices on a node, unless slices are lost and there
are no other nodes. (4) `moves` moves nothing that may stay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from forebay.core import limits
from forebay.core.errors import Invalid, Unavailable
from forebay.core.placement import Members
from forebay.core.types import CODED, LOCAL_URL, Bucket, Headers

K_MAX, M_MAX = 16, 4  # more slices make more requests of each group, and a node is lost more often than four
CELL_BYTES: Final = 4 * limits.MIB  # of a slice: long enough for a disk, short enough to keep a group in memory
ENTRY_BYTES_MAX: Final = 256 * limits.KIB  # up to this objects are in their entry: slices would cost more
SLICES: Final = "-slices"  # the bucket that slices are in: at each node another
_ENTRIES: Final = "-entries-"
_SPELLED: Final = re.compile(rf"{CODED}([1-9][0-9]?)\+([1-9])")
ETAG_HEADER: Final = "x-amz-meta-forebay-etag"  # of a put: the ETag that the object, or its entry, is to have
TIME_HEADER: Final = "x-amz-meta-forebay-time"  # of a put: when the object was written, in Unix time
OF_HEADER: Final = "x-amz-meta-forebay-of"  # of a slice: bucket and key of its entry


class Code(NamedTuple):
    """K slices with the bytes themselves, M computed from them."""

    k: int
    m: int

    @property
    def slices(self) -> int:
        """How many slices a group has."""
        return self.k + self.m

    @property
    def nodes_min(self) -> int:
        """With fewer nodes one of them would have more than M slices of an object."""
        return -(-self.slices // self.m)


def code_of(url: str) -> Code | None:
    """How a bucket at `url` is coded; None for any other. `Invalid` if it is spelled wrong."""
    if not url.startswith(CODED):
        return None
    found = _SPELLED.fullmatch(url)
    code = Code(int(found[1]), int(found[2])) if found else Code(0, 0)
    if not (2 <= code.k <= K_MAX and 1 <= code.m <= M_MAX):
        raise Invalid(
            f"backend URL {url!r} names no code: write {CODED}K+M with K from 2 to {K_MAX} and M from 1 to {M_MAX}, "
            f"such as {CODED}4+2: objects take (K+M)/K of their size, and M of their slices may be lost"
        )
    return code


def entries_of(bucket: str) -> str:
    """The bucket that entries of a bucket's objects are in."""
    return _ENTRIES + bucket


def whose_entries(bucket: str) -> str:
    """The bucket whose entries are in this one; "" for any other bucket."""
    return bucket[len(_ENTRIES) :] if bucket.startswith(_ENTRIES) else ""


def is_hidden(bucket: str) -> bool:
    """Whether a bucket of this name has slices or entries: only nodes name it."""
    return bucket == SLICES or bool(whose_entries(bucket))


def hidden_of(bucket: Bucket) -> Bucket | None:
    """The bucket that entries of a coded bucket are in, as its nodes have it; None for any other bucket."""
    code = code_of(bucket.url)
    if code is None:
        return None
    copies = max(code.m + 1, bucket.copies)
    return Bucket(entries_of(bucket.name), LOCAL_URL, 0.0, write="local", copies=copies, created_s=bucket.created_s)


SLICES_BUCKET: Final = Bucket(SLICES, LOCAL_URL, 0.0, write="local", copies=1)


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What an object is. `modified_s` is Unix time; `headers` and `tags` are the object's. `generation` names its
    slices, and is its version. `revision` counts changes of anything else. Small: `body`. Else `places`: nodes by
    number."""

    etag: str
    size_bytes: int
    modified_s: float
    generation: str
    revision: int = 0
    headers: Headers = ()
    tags: str = ""
    body: bytes | None = None
    k: int = 0
    m: int = 0
    cell_bytes: int = CELL_BYTES
    places: tuple[str, ...] = ()

    @property
    def code(self) -> Code:
        """How it is coded."""
        return Code(self.k, self.m)

    @property
    def groups(self) -> int:
        """How many groups it has; 0 if it is in the entry."""
        return 0 if self.body is not None else -(-self.size_bytes // (self.k * self.cell_bytes))

    def group_bytes(self, group: int) -> int:
        """How long that group is: all but the last are alike."""
        whole = self.k * self.cell_bytes
        return min(whole, self.size_bytes - group * whole)

    def slice_bytes(self, group: int) -> int:
        """How long each slice of that group is. The last cells of the last group may end in zeros."""
        return -(-self.group_bytes(group) // self.k)

    def shown(self) -> Shown:
        """What a listing has to say of it."""
        return Shown(self.etag, self.size_bytes, self.modified_s, self.generation, self.revision, self.body is None)


class Shown(NamedTuple):
    """What an entry's ETag says."""

    etag: str
    size_bytes: int
    modified_s: float
    generation: str
    revision: int
    has_slices: bool

    def text(self) -> str:
        """As an ETag."""
        kind = "s" if self.has_slices else "e"
        millis = round(self.modified_s * 1000)
        return f"{self.etag}.{self.size_bytes}.{millis}.{self.generation}.{self.revision}.{kind}"

    @classmethod
    def of(cls, text: str) -> Shown:
        """What `text` wrote. `Invalid` for anything else."""
        parts = text.rsplit(".", 5)
        if (
            len(parts) != 6
            or parts[5] not in ("s", "e")
            or not all(each.isdecimal() for each in (*parts[1:3], parts[4]))
        ):
            raise Invalid(f"{text!r} is the ETag of no entry: somebody else wrote where a coded bucket has its entries")
        etag, size_bytes, millis, generation, revision, kind = parts
        return cls(etag, int(size_bytes), int(millis) / 1000, generation, int(revision), kind == "s")


encode_entry = msgspec.msgpack.Encoder().encode
_decode_entry = msgspec.msgpack.Decoder(Entry).decode


def decode_entry(data: bytes, name: str) -> Entry:
    """What `encode_entry` wrote. `Invalid` for anything else."""
    try:
        entry = _decode_entry(data)
    except msgspec.MsgspecError as error:
        raise Invalid(f"the entry of {name} cannot be read ({error}): write the object again") from None
    if entry.body is None and (len(entry.places) != entry.code.slices or not entry.cell_bytes or entry.k < 1):
        raise Invalid(f"the entry of {name} names {len(entry.places)} places for {entry.k}+{entry.m}: write it again")
    return entry


def slice_name(generation: str, group: int, number: int) -> str:
    """The key of one slice at its place."""
    return f"{generation}/{number:02d}/{group:08x}"


def split_slice(name: str) -> tuple[str, int, int] | None:
    """Generation, group and number; None for what is no slice's name."""
    parts = name.split("/")
    try:
        return parts[0], int(parts[2], 16), int(parts[1])
    except (IndexError, ValueError):
        return None


class Span(NamedTuple):
    """The bytes `start` to `end` (half-open) of the slice with this number, of a group."""

    group: int
    number: int
    start: int
    end: int


def spans(entry: Entry, start: int, end: int) -> Iterator[Span]:
    """Where the bytes `start` to `end` (half-open) of an object lie, in order."""
    whole = entry.k * entry.cell_bytes
    while start < end:
        group, at = divmod(start, whole)
        length = entry.slice_bytes(group)
        number, within = divmod(at, length)
        upto = min(length, within + end - start)
        yield Span(group, number, within, upto)
        start += upto - within


# --- places -----------------------------------------------------------------------------------------------------------
def choose(generation: str, code: Code, nodes: Mapping[str, float]) -> tuple[str, ...]:
    """A place for each slice, among nodes with these weights. `Unavailable` if they are too few."""
    if len(nodes) < code.nodes_min:
        raise Unavailable(
            f"{code.k}+{code.m} slices need {code.nodes_min} nodes that take some, and there are {len(nodes)}: what "
            "was written stays on two nodes until more come"
        )
    ranked = _ranked(generation, nodes)
    return tuple(ranked[number % len(ranked)] for number in range(code.slices))


def moves(entry: Entry, nodes: Mapping[str, float], lost: frozenset[str], leaving: frozenset[str]) -> dict[int, str]:
    """Which slices go to which node: those of `lost` nodes, of `leaving` ones, and what is more than a node's share.
    `nodes` (with weights) take slices; a place that is none of all these is waited for."""
    if not nodes:
        return {}
    share = -(-entry.code.slices // len(nodes))
    have = Counter(place for place in entry.places if place in nodes)
    found: dict[int, str] = {}
    ranked = _ranked(entry.generation, nodes)

    def give(number: int, at_most: int) -> None:
        place = min(ranked, key=lambda node: have[node])  # of those with fewest, the first in rank
        if have[place] < at_most:
            have[place] += 1
            found[number] = place

    for number, place in enumerate(entry.places):
        if place in lost:
            give(number, entry.code.slices)  # wherever it is, it is better than nowhere
    if share > entry.m:
        return found  # a node that leaves would leave the others with more than may be lost
    for number, place in enumerate(entry.places):
        if place in leaving:
            give(number, share)
    for number, place in enumerate(entry.places):
        if have[place] > share and place in nodes:
            before = len(found)
            give(number, share)
            have[place] -= len(found) - before
    return found


def _ranked(generation: str, nodes: Mapping[str, float]) -> Sequence[str]:
    return Members(nodes).order(SLICES, generation)
