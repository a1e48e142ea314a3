"""The files that `ForebayFileSystem.open` returns.

Theory. Reading is `files.ObjectReader` (one version, from the node's own file on its host, one GET when it is read from
end to end) under Python's buffered reader with a small buffer. Large reads pass the buffer by; small reads and lines
run at the speed of C. fsspec's caches read megabytes ahead, which is wrong for the columns of a Parquet file beside a
node. `cache_type` selects one anyway.

Writing is `files.ObjectWriter`: closing the file makes the object, whole. In a transaction closing keeps the bytes, and
`commit` makes the object. Appending reads a small object first, and writes it back on the condition that nobody changed
it.

Invariants. (1) All bytes of a file are of one version. (2) Every failure is an `OSError`.
"""

from __future__ import annotations

import asyncio
import io
import warnings
from types import TracebackType
from typing import Any

from fsspec.asyn import AbstractAsyncStreamedFile
from fsspec.spec import AbstractBufferedFile

from forebay.client.files import ObjectReader, ObjectWriter, find_object
from forebay.client.sync import Client
from forebay.client.upload import PutOptions
from forebay.core import limits
from forebay.core.errors import NotFound, NotSupported
from forebay.fsspec.errors import told

BUFFER_BYTES = 64 * limits.KIB
APPEND_BYTES_MAX = 64 * limits.MIB


class _Raw(ObjectReader):
    """An `ObjectReader` whose errors are `OSError`s."""

    def readinto(self, buffer: Any) -> int:
        with told(self.name):
            return super().readinto(buffer)

    def read(self, size: int | None = -1) -> bytes:
        with told(self.name):
            return super().read(size)


def open_raw(client: Client, bucket: str, key: str, etag: str = "") -> _Raw:
    """The object as it is now, or with `etag` exactly that version."""
    with told(f"{bucket}/{key}"):
        return _Raw(client, bucket, key, *find_object(client, bucket, key, etag))


class ReadFile(io.BufferedReader):
    """An object, open for reading: seekable, of one version. `size`, `etag`, `path` and `fs` say what it is of."""

    def __init__(self, fs: Any, path: str, raw: _Raw, buffer_bytes: int) -> None:
        super().__init__(raw, buffer_bytes)
        self.fs, self.path = fs, path
        self.size, self.etag = raw.size, raw.etag
        self.blocksize = buffer_bytes
        self._details: dict[str, Any] | None = None

    @property
    def details(self) -> dict[str, Any]:
        """What `fs.info` says of it now."""
        if self._details is None:
            self._details = self.fs.info(self.path)
        return self._details

    def info(self) -> dict[str, Any]:
        return self.details

    def __repr__(self) -> str:
        return f"<ReadFile {self.path} of {self.size} bytes>"

    def __reduce__(self) -> tuple[Any, ...]:
        return reopen, (self.fs, self.path, self.etag, self.blocksize, 0 if self.closed else self.tell(), self.closed)


def reopen(fs: Any, path: str, etag: str, buffer_bytes: int, position: int, closed: bool) -> ReadFile:
    """A pickled file where it arrived: the same version at the same place, or an error."""
    file: ReadFile = fs.open(path, "rb", block_size=buffer_bytes, etag=etag)
    file.seek(position)
    if closed:
        file.close()
    return file


class CachedFile(AbstractBufferedFile):  # type: ignore[misc]
    """An object, open for reading through one of fsspec's caches."""

    def __init__(self, fs: Any, path: str, raw: _Raw, **options: Any) -> None:
        self.etag = raw.etag
        raw.close()
        super().__init__(fs, path, "rb", size=raw.size, **options)

    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = self.fs.cat_file(self.path, start, end, etag=self.etag)  # caches may ask from several threads
        return data


class WriteFile(ObjectWriter):
    """A file that becomes the object at `path` when it is closed, or in a transaction when that ends well."""

    def __init__(
        self, fs: Any, path: str, client: Client, bucket: str, key: str, options: PutOptions, *, autocommit: bool = True
    ) -> None:
        super().__init__(client, bucket, key, options)
        self.fs, self.path = fs, path
        self.autocommit = autocommit
        self._kept = False  # closed for who wrote it, and not committed yet
        self._new = options.only_new

    @property
    def closed(self) -> bool:
        return self._kept or super().closed

    def close(self) -> None:
        if self.autocommit:
            self.commit()
        elif not self.closed:
            self._kept = True

    def commit(self) -> None:
        """Make what was written the object."""
        self._kept = False
        if not super().closed:
            try:
                with told(self.path, new=self._new):
                    super().close()
            finally:
                self.fs.invalidate_cache(self.path)

    def discard(self) -> None:
        """Forget what was written."""
        self._kept = False
        self.abort()

    def __del__(self) -> None:
        try:
            if not self.closed:
                warnings.warn(f"{self.path} was never closed, so nothing was written", ResourceWarning, stacklevel=2)
        except AttributeError:
            pass  # it was never made whole, or Python ends, and modules are gone
        super().__del__()


class CompressedFile(io.RawIOBase):
    """What is written to it goes through `compressor` into `file`, and both are closed as one."""

    mode = "wb"

    def __init__(self, file: WriteFile, compressor: Any) -> None:
        super().__init__()
        self._file, self._compressor = file, compressor
        self.fs, self.path = file.fs, file.path

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._compressor.write(data)
        return memoryview(data).nbytes

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._compressor.close()
            self._file.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            super().close()
            self._file.discard()
        self.close()

    def __del__(self) -> None:
        """Nothing: the file below says that it was not closed."""


def open_append(fs: Any, path: str, client: Client, bucket: str, key: str, *, autocommit: bool) -> WriteFile:
    """A `WriteFile` that begins with what the object is now, and fails if somebody changes that meanwhile."""
    with told(path):
        try:
            with client.open(bucket, key) as reader:
                if reader.size > APPEND_BYTES_MAX:
                    raise NotSupported(
                        f"the object has {reader.size} bytes, and an append writes all of it again: up to "
                        f"{APPEND_BYTES_MAX} that is done; write a larger one as several objects"
                    )
                before, options = reader.read(), PutOptions((), reader.etag)
        except NotFound:
            before, options = b"", PutOptions((), "", True)
        file = WriteFile(fs, path, client, bucket, key, options, autocommit=autocommit)
        file.write(before)
        return file


class AsyncReadFile(AbstractAsyncStreamedFile):  # type: ignore[misc]
    """An object, open for reading by coroutines."""

    def __init__(self, fs: Any, path: str, size_bytes: int, etag: str) -> None:
        super().__init__(fs, path, "rb", size=size_bytes, cache_type="none")
        self.etag = etag

    async def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = await self.fs._cat_file(self.path, start, end, etag=self.etag)
        return data


class AsyncWriteFile:
    """A file that coroutines write; it becomes the object when it is closed. An error inside `async with` writes
    nothing."""

    mode = "wb"

    def __init__(self, file: WriteFile) -> None:
        self._file = file
        self.path = file.path

    @property
    def closed(self) -> bool:
        return self._file.closed

    def tell(self) -> int:
        return self._file.tell()

    async def write(self, data: Any) -> int:
        """Keep `data`, in memory or in a temporary file."""
        return self._file.write(data)

    async def flush(self, force: bool = False) -> None:
        """Nothing to do: there is no object before `close`."""

    async def close(self) -> None:
        await asyncio.to_thread(self._file.close)

    async def __aenter__(self) -> AsyncWriteFile:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
        else:
            self._file.discard()
