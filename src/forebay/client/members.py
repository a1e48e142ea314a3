"""The members of shards at the client: lists, finds and appends them.

Theory. The node's index of a shard (`core/formats/members.py`) is one answer of some bytes per member, valid for the
shard's version. So a client caches it, and revalidates it with its ETag; the answer to that is one line. The cache is
bounded by members, not shards. The shard that was unused for longest goes first.

Most users need names and sizes, and read members by name or in batches. Readers of many samples read ranges: `find`
says where a member is. Those places are true of the version whose `etag` the members carry, so pass it when you read.

Invariant. The node confirmed the result of `MembersCache.read` in the same call.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator

from forebay.client import flows
from forebay.client.upload import Data
from forebay.core.errors import Corrupt, Invalid
from forebay.core.formats import members
from forebay.core.formats.members import Member, MemberIndex
from forebay.core.messages.calls import Written
from forebay.core.messages.http1 import Request, Source, encode_path, with_query

MEMBERS_KEPT_MAX = 1_000_000  # of all shards in one client: about 200 MB once their names were looked up


class Members:
    """The members of one version of a shard: `len`, iteration gives (name, size), `in` looks for a name.

    Of several members with one name, `find` and reads by name mean the last. `etag` and `version` are the shard's.
    """

    __slots__ = ("index",)

    def __init__(self, index: MemberIndex) -> None:
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return zip(self.index.names, self.index.sizes(), strict=True)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.index.number(name) is not None

    def __repr__(self) -> str:
        return f"<{len(self)} members of a {self.index.kind}, version {self.index.version}>"

    @property
    def names(self) -> list[str]:
        """All names, in the archive's order."""
        return self.index.names

    @property
    def etag(self) -> str:
        """The shard's; read ranges with it, so that they are of this version."""
        return self.index.etag

    @property
    def version(self) -> str:
        return self.index.version

    @property
    def plain(self) -> bool:
        """Whether the shard is compressed as a whole: places are then in its unpacked form, which only the node has."""
        return self.index.plain

    def find(self, name: str) -> tuple[int, int, int]:
        """Where the member is: the half-open range of its bytes in the shard (but see `plain`), and how they are packed
        there: 0 not at all, 8 deflated. `NotFound` (`NoSuchMember`)."""
        member = self.index.find(name)
        return member.start, member.end, member.method

    def member(self, name: str) -> Member:
        """All that is known of a member. `NotFound` (`NoSuchMember`)."""
        return self.index.find(name)


class MembersCache:
    """The members of shards that one client knows. Threads may share it."""

    def __init__(self, members_max: int = MEMBERS_KEPT_MAX) -> None:
        self._members_max = members_max
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], Members] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return len(self._kept)

    def known(self, bucket: str, key: str) -> Members | None:
        """What is kept of a shard, of whatever version; the node is not asked."""
        with self._lock:
            found = self._kept.get((bucket, key))
            if found is not None:
                self._kept.move_to_end((bucket, key))
            return found

    def read(self, bucket: str, key: str, version: str = "") -> flows.Flow[Members]:
        """The members of a shard as it is now, or of a version that its backend keeps."""
        name = (bucket, f"{key}\0{version}" if version else key)
        with self._lock:
            found = self._kept.get(name)
            if found is not None:
                self._kept.move_to_end(name)
        path, headers = encode_path("-/v1/members", bucket, key), [("Accept", "application/msgpack")]
        if found is not None and found.etag:
            headers.append(("If-None-Match", f'"{found.etag}"'))
        response = yield Request("GET", with_query(path, (("version", version),)), tuple(headers))
        if response.status == 304 and found is not None:
            return found
        if not response.ok:
            raise flows.raised(response, f"the members of {bucket}/{key}")
        index = members.decode(response.body)
        if index.etag != response.headers.get("etag", "").strip('"'):
            raise Corrupt(f"the members of {bucket}/{key} are of another version than the answer says: try again")
        made = Members(index)
        with self._lock:
            old = self._kept.pop(name, None)
            self._count += len(made) - (len(old) if old is not None else 0)
            self._kept[name] = made
            while self._count > self._members_max and len(self._kept) > 1:
                self._count -= len(self._kept.popitem(last=False)[1])
        return made


def append(
    bucket: str, key: str, name: str, data: Data, *, etag: str = "", only_new: bool = False
) -> flows.Flow[Written]:
    """Make `data` (bytes, the file at a path, or what an open binary file still gives) one more member of a tar."""
    if not name:
        raise Invalid("a member needs a name: give one")
    if isinstance(data, str | os.PathLike):
        with open(data, "rb", buffering=0) as file:
            at = os.fstat(file.fileno())
            if stat.S_ISREG(at.st_mode):
                source = Source(file.fileno(), 0, at.st_size, None)
                return (yield from _append(bucket, key, name, b"", source, etag, only_new))
            return (yield from _append(bucket, key, name, file.readall() or b"", None, etag, only_new))
    body = memoryview(data).cast("B") if isinstance(data, bytes | bytearray | memoryview) else data.read()
    return (yield from _append(bucket, key, name, body, None, etag, only_new))


def _append(
    bucket: str, key: str, name: str, body: bytes | memoryview, source: Source | None, etag: str, only_new: bool
) -> flows.Flow[Written]:
    headers = [("Content-Type", "application/octet-stream")]
    headers += [("If-Match", f'"{etag}"')] if etag else []
    headers += [("If-None-Match", "*")] if only_new else []
    target = with_query(encode_path("-/v1/members", bucket, key), (("name", name),))
    request = Request("POST", target, tuple(headers), body, source=source, of=(bucket, key))
    written: Written = yield from flows.ask_json(request, f"appending {name!r} to {bucket}/{key}", Written)
    return written
