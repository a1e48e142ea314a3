"""Where shards are written to: a folder here, or a prefix of a bucket at a node.

Theory. A shard is assembled in a file, since its size must be known before it is sent and it may be larger than memory.
In a folder that is a part file, which a rename makes the shard; for a bucket it is a file without a name, which ends
with the process. So a killed writer leaves at most one part file in a folder, and the next one begins with removing it.

Only one process may write to a place. In a folder a lock on the folder says so, and the kernel drops it with the
process. In a bucket each write is conditional on what was there when the writer began.

Invariant. What has a name is whole.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from forebay.client.sync import Client
from forebay.client.upload import PutOptions, put_file
from forebay.core.errors import Busy, Invalid, NotFound, Precondition
from forebay.core.types import check_bucket_name, check_key

if TYPE_CHECKING:
    from collections.abc import Iterator

_SCHEMES = ("s3://", "forebay://")
PART = ".shard.part"


class Place(Protocol):
    """A folder or a prefix."""

    def names(self) -> Iterator[tuple[str, int]]:
        """What is there, and how large it is."""
        ...

    def read(self, name: str) -> bytes | None:
        """All of what is `name`; None if there is none."""
        ...

    def part(self) -> IO[bytes]:
        """A file to be filled, for `keep`."""
        ...

    def keep(self, name: str, part: IO[bytes]) -> None:
        """Make it `name`, whole and on disk, and close it."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """The same with `data`."""
        ...

    def remove(self, name: str) -> None: ...

    def close(self) -> None: ...


def place_of(place: str | os.PathLike[str], url: str | None) -> Place:
    """`bucket/prefix` or `s3://bucket/prefix` at the node; a path object, or what begins with `/`, `./`, `../` or `~`,
    is a folder here."""
    folder = folder_of(place)
    return Folder(folder) if folder else Prefix(*bucket_and_prefix(str(place)), url)


def folder_of(place: str | os.PathLike[str]) -> str:
    """The folder that is meant; empty if it is a bucket's prefix."""
    if isinstance(place, str) and not place.startswith(("/", "./", "../", "~")) and place not in (".", ".."):
        return ""
    return str(Path(place).expanduser())


def bucket_and_prefix(place: str) -> tuple[str, str]:
    """Of `bucket/prefix` or `s3://bucket/prefix`, the prefix as a folder; else `Invalid`."""
    text = place
    for scheme in _SCHEMES:
        text = text.removeprefix(scheme)
    bucket, _, prefix = text.partition("/")
    if "://" in text or not bucket:
        raise Invalid(
            f"{place!r} names neither a bucket nor a folder: write s3://BUCKET/PREFIX, or a folder as ./FOLDER"
        )
    if prefix:
        check_key(prefix)
    return check_bucket_name(bucket), prefix if not prefix or prefix.endswith("/") else f"{prefix}/"


class Folder:
    """A folder of this machine, made if it is not there."""

    def __init__(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise Busy(f"another process writes shards to {path}: wait until it has ended") from None
        self.remove(PART)

    def __str__(self) -> str:
        return self._path

    def _at(self, name: str) -> str:
        return os.path.join(self._path, name)

    def names(self) -> Iterator[tuple[str, int]]:
        with os.scandir(self._path) as entries:
            for entry in entries:
                yield entry.name, entry.stat(follow_symlinks=False).st_size

    def read(self, name: str) -> bytes | None:
        try:
            with open(self._at(name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def part(self) -> IO[bytes]:
        return open(self._at(PART), "w+b")

    def keep(self, name: str, part: IO[bytes]) -> None:
        with part:
            part.flush()
            os.fsync(part.fileno())
        os.replace(self._at(PART), self._at(name))
        os.fsync(self._fd)

    def put(self, name: str, data: bytes) -> None:
        part = self.part()
        part.write(data)
        self.keep(name, part)

    def remove(self, name: str) -> None:
        try:
            os.unlink(self._at(name))
        except FileNotFoundError:
            pass

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Prefix:
    """A prefix of a bucket."""

    def __init__(self, bucket: str, prefix: str, url: str | None) -> None:
        self._bucket, self._prefix = bucket, prefix
        self._client = Client(url)
        self._etags: dict[str, str] = {}  # of what is there

    def __str__(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}"

    def names(self) -> Iterator[tuple[str, int]]:
        for page in self._client.list_pages(self._bucket, self._prefix):
            for entry in page.entries:
                name = entry.key[len(self._prefix) :]
                if name:  # else the folder's own mark
                    self._etags[name] = entry.etag
                    yield name, entry.size_bytes

    def read(self, name: str) -> bytes | None:
        try:
            return self._client.get(self._bucket, self._prefix + name)
        except NotFound as error:
            if error.code != "NoSuchKey":
                raise
            return None

    def part(self) -> IO[bytes]:
        return tempfile.TemporaryFile(prefix="forebay-shard-")

    def keep(self, name: str, part: IO[bytes]) -> None:
        key, etag = self._prefix + name, self._etags.get(name)
        with part:
            part.flush()
            options = PutOptions.of("", None, etag or "", etag is None)
            put = put_file(self._bucket, key, part.fileno(), os.fstat(part.fileno()).st_size, options, resumable=False)
            try:
                self._etags[name] = self._client.run(put).etag
            except Precondition as error:
                raise Precondition(
                    f"another process writes to {self}: {name} is not what it was. If none does any more, start again"
                ) from error
            finally:
                self._client.changed(self._bucket, key)

    def put(self, name: str, data: bytes) -> None:
        part = self.part()
        part.write(data)
        self.keep(name, part)

    def remove(self, name: str) -> None:
        self._client.delete(self._bucket, self._prefix + name)
        self._etags.pop(name, None)

    def close(self) -> None:
        self._client.close()
