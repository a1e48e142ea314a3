"""Packs the files of a folder, or the objects under a prefix, into shards.

Theory. What there is is listed first, so names and sizes say which samples there are, which of them no shard can hold
and how much is to be done, before anything is written. Samples go in byte order of their keys. A packing that was
killed is begun again by the same call; the listing, with each file's time or each object's ETag, says whether it is
still the same input.

Objects are read many at a time, but for large ones, which go from the socket to the shard.

Invariant. Nothing is written if the input is not one that shards can hold.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import IO, Any, NamedTuple

import xxhash

from forebay.client.shards.places import bucket_and_prefix, folder_of
from forebay.client.shards.writer import SHARD_BYTES, Content, FileContent, ShardWriter
from forebay.client.sync import Client
from forebay.core import limits
from forebay.core.errors import Invalid, NotFound
from forebay.core.formats.samples import Shard, check_parts, joined, split
from forebay.core.messages.batch import Item

AHEAD_BYTES = 32 * limits.MIB  # of objects that are read at once
AHEAD_ITEMS = 1024
LARGE_BYTES = 4 * limits.MIB  # such an object is read by itself
Progress = Callable[[int, int], None]  # bytes done, and of how many


class Found(NamedTuple):
    """One file or object: the parts of its name below the source, how large it is, and what tells that it changed."""

    key: str
    extension: str
    size_bytes: int
    version: str


def pack(
    source: str | os.PathLike[str],
    place: str | os.PathLike[str],
    *,
    parts: Sequence[str] = (),
    shard_bytes: int | str = SHARD_BYTES,
    samples_max: int | None = None,
    url: str | None = None,
    progress: Progress = lambda done, total: None,
) -> list[Shard]:
    """Pack what lies under `source` into shards at `place`, both as of `ShardWriter`.

    With `parts` only files with these extensions count, and each sample has all of them. Errors are of `ShardWriter`;
    `Invalid` also for a name that is none of a sample's part, `NotFound` where there is nothing.
    """
    with Client(url) as client:
        folder = folder_of(source)
        origin = _Files(folder) if folder else _Objects(client, *bucket_and_prefix(str(source)))
        if _spelled(place).startswith(_spelled(source)):
            raise Invalid(f"{place} lies in {source}, so shards would be packed too: take a place beside it")
        found = sorted(_chosen(origin, parts))
        if not found:
            raise NotFound(f"there is nothing to pack under {source}: look at the place")
        samples = [list(group) for _, group in groupby(found, key=lambda part: part.key)]
        _check(samples, parts)
        total = sum(part.size_bytes for part in found)
        options: dict[str, Any] = {"shard_bytes": shard_bytes, "samples_max": samples_max, "url": url}
        with ShardWriter(place, made_of=_made_of(found), **options) as writer:
            left = samples[writer.samples :]
            done = total - sum(part.size_bytes for sample in left for part in sample)
            for sample, contents in origin.contents(left):
                progress(done, total)
                writer.write({"__key__": sample[0].key, **contents})
                done += sum(part.size_bytes for part in sample)
            progress(done, total)
        return writer.shards


def _spelled(place: str | os.PathLike[str]) -> str:
    """A place in one way, with a slash at its end."""
    folder = folder_of(place)
    return f"{os.path.realpath(folder)}/" if folder else "s3://{}/{}".format(*bucket_and_prefix(str(place)))


def _chosen(origin: _Objects | _Files, parts: Sequence[str]) -> Iterator[Found]:
    wanted = {part.lower().lstrip(".") for part in parts}
    for name, size_bytes, version in origin.names():
        named = split(name)
        if named is None:
            if parts:
                continue
            raise Invalid(f"{name!r} is no part of a sample, having no extension: rename it, or say the parts to take")
        if not wanted or named[1].lower() in wanted:
            yield Found(*named, size_bytes, version)


def _check(samples: list[list[Found]], parts: Sequence[str]) -> None:
    for sample in samples:
        extensions = [part.extension for part in sample]
        check_parts(sample[0].key, extensions)
        for extension in extensions:
            joined(sample[0].key, extension)
        missing = {part.lower().lstrip(".") for part in parts} - {extension.lower() for extension in extensions}
        if missing:
            raise Invalid(f"the sample {sample[0].key!r} has no {min(missing)!r}: add it, or say fewer parts")


def _made_of(found: list[Found]) -> str:
    digest = xxhash.xxh3_128()
    for part in found:
        digest.update("\0".join((part.key, part.extension, str(part.size_bytes), part.version, "")).encode(
            "utf-8", "surrogateescape"
        ))  # fmt: skip
    return digest.hexdigest()


class _Files:
    """The regular files under a folder; links are followed to files, not to folders."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        if not os.path.isdir(folder):
            raise NotFound(f"there is no folder {folder}: look at the path, or write s3://BUCKET/PREFIX")

    def names(self) -> Iterator[tuple[str, int, str]]:
        for at, folders, names in os.walk(self._folder, onerror=_raise):
            folders.sort()
            for name in names:
                path = os.path.join(at, name)
                if os.path.isfile(path):
                    facts = os.stat(path)
                    yield (
                        os.path.relpath(path, self._folder).replace(os.sep, "/"),
                        facts.st_size,
                        str(facts.st_mtime_ns),
                    )

    def contents(self, samples: list[list[Found]]) -> Iterator[tuple[list[Found], dict[str, Content]]]:
        for sample in samples:
            paths = {part.extension: f"{part.key}.{part.extension}" for part in sample}
            yield (
                sample,
                {extension: FileContent(os.path.join(self._folder, path)) for extension, path in paths.items()},
            )


def _raise(error: OSError) -> None:
    raise error


class _Objects:
    """The objects under a prefix."""

    def __init__(self, client: Client, bucket: str, prefix: str) -> None:
        self._client, self._bucket, self._prefix = client, bucket, prefix

    def names(self) -> Iterator[tuple[str, int, str]]:
        for page in self._client.list_pages(self._bucket, self._prefix):
            for entry in page.entries:
                if not entry.key.endswith("/"):  # a folder's mark
                    yield entry.key[len(self._prefix) :], entry.size_bytes, entry.etag

    def contents(self, samples: list[list[Found]]) -> Iterator[tuple[list[Found], dict[str, bytes | Content]]]:
        ahead: list[list[Found]] = []
        size_bytes = items = 0
        for sample in samples:
            small = [part for part in sample if part.size_bytes < LARGE_BYTES]
            size_bytes, items = size_bytes + sum(part.size_bytes for part in small), items + len(small)
            ahead.append(sample)
            if size_bytes >= AHEAD_BYTES or items >= AHEAD_ITEMS:
                yield from self._read(ahead)
                ahead, size_bytes, items = [], 0, 0
        yield from self._read(ahead)

    def _read(self, samples: list[list[Found]]) -> Iterator[tuple[list[Found], dict[str, bytes | Content]]]:
        small = [part for sample in samples for part in sample if 0 < part.size_bytes < LARGE_BYTES]
        read = self._client.get_many([Item(self._bucket, self._key(part), 0, None, "", part.version) for part in small])
        values = iter(read)
        for sample in samples:
            contents: dict[str, bytes | Content] = {}
            for part in sample:
                if 0 < part.size_bytes < LARGE_BYTES:
                    contents[part.extension] = next(values)  # type: ignore[assignment]  # errors were raised
                elif part.size_bytes:
                    contents[part.extension] = _Object(self._client, self._bucket, self._key(part), part)
                else:
                    contents[part.extension] = b""
            yield sample, contents

    def _key(self, part: Found) -> str:
        return f"{self._prefix}{part.key}.{part.extension}"


class _Object:
    """A large object, of the version that was listed."""

    def __init__(self, client: Client, bucket: str, key: str, part: Found) -> None:
        self._client, self._bucket, self._key, self._etag = client, bucket, key, part.version
        self.size_bytes = part.size_bytes

    def copy_to(self, file: IO[bytes]) -> None:
        file.flush()
        self._client.get_to_fd(self._bucket, self._key, file.fileno(), etag=self._etag)
        file.seek(0, os.SEEK_END)
