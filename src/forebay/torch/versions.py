"""A source that reads the versions that a run began with, whatever the objects are by now.

Theory. A listing of versions (`Client.listing(…, versions=True)`) has for each object the id of the version that was
the newest when it was made. With one of these, nothing is listed any more: what a dataset is made of is that listing
without the ids, and every item that it reads gets the id of its object. So keys, sizes and etags, and with them order
and states, are those of a dataset that was made of the same objects without versions.

The node knows a listing that was made at it, or at another process's asking, as long as its cache keeps it. With it,
hints are told in its terms. When it is gone it cannot be made again, since the objects have newer versions by then: the
job goes on without hints.

Invariants. (1) No item goes out without a version; what is not in the listing is `NotFound`. (2) Objects have the same
numbers in both listings.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from forebay.core.errors import Invalid, NotFound
from forebay.core.formats.listing import Listing, build, pack
from forebay.core.formats.members import MemberIndex
from forebay.core.messages.batch import Item
from forebay.core.versions import split_name, whose_versions
from forebay.torch.source import Answers, Source, Telling

_PIECE = 10_000  # objects at once


class Pinned:
    """`source`, at the versions in a listing of them: `versions`, or its bytes. `Corrupt` and `Invalid` for what is
    none of `place`."""

    def __init__(self, source: Source, place: tuple[str, str], versions: Listing | bytes) -> None:
        found = versions if isinstance(versions, Listing) else Listing(versions)
        said = (whose_versions(found.bucket), found.prefix)
        if not said[0]:
            raise Invalid(
                "versions= is a listing of objects, not of their versions: make one with "
                f"client.listing({place[0]!r}, {place[1]!r}, versions=True), or pass it as listing="
            )
        if said != place:
            raise Invalid(f"versions= lists {'/'.join(said)}, and the dataset is of {'/'.join(place)}: pass its own")
        self._source, self._versions = source, found
        self._ids: dict[str, str] = {}  # by key, of what was asked for

    def __reduce__(self) -> tuple[object, ...]:
        return Pinned, (self._source, _place(self._versions), bytes(self._versions.data))

    def listing(self, bucket: str, prefix: str, id: str = "") -> Listing:
        """The objects as they were, by their own keys."""
        count = len(self._versions)
        pieces = []
        for first in range(0, count, _PIECE):
            entries = [self._versions.entry(number) for number in range(first, min(first + _PIECE, count))]
            pieces.append(pack([entry._replace(key=split_name(entry.key)[0]) for entry in entries]))
        return Listing(build(bucket, prefix, pieces))

    def members(self, bucket: str, key: str, etag: str, version: str = "") -> MemberIndex:
        found = self._id(key)
        if not found:
            raise _unknown(bucket, key)
        try:
            return self._source.members(bucket, key, etag, found)
        except NotFound as error:
            raise _told(bucket, key, error) from error

    def room_bytes(self, bucket: str, *, cluster: bool = False) -> int | None:
        return self._source.room_bytes(bucket, cluster=cluster)

    def get_many(self, items: Sequence[Item]) -> Answers:
        named = [msgspec.structs.replace(item, version=self._id(item.key)) for item in items]
        answers = self._source.get_many([item for item in named if item.version])
        came = iter(answers.values)
        values = [next(came) if item.version else _unknown(item.bucket, item.key) for item in named]
        for number, value in enumerate(values):
            if isinstance(value, NotFound):
                values[number] = _told(items[number].bucket, items[number].key, value)
        return answers._replace(values=values)

    def hints(self, job: str, listing: Listing) -> Telling | None:
        return self._source.hints(job, self._versions)

    def _id(self, key: str) -> str:
        """The version of the object; empty for one that was not there."""
        found = self._ids.get(key)
        if found is None:
            at = self._versions.first_from(f"{key}\0")
            named, version = split_name(self._versions.key(at)) if at < len(self._versions) else ("", "")
            found = self._ids[key] = version if named == key else ""
        return found


def _place(versions: Listing) -> tuple[str, str]:
    return whose_versions(versions.bucket), versions.prefix


def _unknown(bucket: str, key: str) -> NotFound:
    return NotFound(f"{bucket}/{key} was not there when versions= was listed: make a new listing of versions")


def _told(bucket: str, key: str, error: NotFound) -> NotFound:
    """The error of an object whose version is gone, in the words of who pinned it; others as they are."""
    if error.code != "NoSuchVersion":
        return error
    return NotFound(
        f"{bucket}/{key}: the bucket has the version that versions= names no more (was it deleted, or did it expire?): "
        "begin an epoch with a new listing of versions",
        code=error.code,
    )
