"""A directory as a bucket: `file:///srv/data`. Keys are relative paths of regular files.

Theory. An open descriptor pins a file better than any token. A rename over the name does not touch the file being read,
and writing in place changes its mtime or size, which are compared after every piece. So a body is one version or an
error. The version is inode, mtime in nanoseconds and size. It misses one case: a write in place that keeps the size
within one tick of the kernel's clock (at most 4 ms) after the write before.

Directory order is not S3's ('a.txt' < 'a/b' < 'a0'). The walk sorts each directory's names with '/' appended to those
of directories; depth first is then byte order. It holds one sorted list of names per level. It also keeps the lists of
the last few directories while their mtime stands still, since the next page begins where the last one ended.

Rejected: obstore's LocalStore (unsorted listings, no control characters, and a listing with an offset reads the whole
tree); os.walk (memory of all levels, wrong order).

Invariants. (1) No key leads out of the directory by its own text: `..` and empty segments name nothing. Reads follow
symbolic links, since trees of links to other disks are common: whoever may write into the directory decides what is
served, but for what `allows` refuses. Where a path leads is asked at each use, of a file that is read once it is open.
Nothing is written or removed behind a link that leaves the directory (`beneath.py`). (2) Names that are not UTF-8 and
everything that is not a regular file are no objects. (3) No call blocks the event loop. (4) A put is visible whole and
synced, or not at all (`newfile.py`). (5) A missing root, or an empty mount point, is not an empty bucket.
"""

from __future__ import annotations

import asyncio
import os
import stat
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from forebay.backends import errors, pages
from forebay.backends.bounds import AllowsPath
from forebay.backends.local import newfile
from forebay.backends.local.newfile import NewFile
from forebay.backends.local.unfinished import Unfinished
from forebay.backends.refusing import Refusing
from forebay.backends.seam import Body
from forebay.core import limits
from forebay.core.errors import Denied, ForebayError, Invalid, NotFound, NotSupported, Unavailable
from forebay.core.types import Headers, ListEntry, ListPage, ObjectInfo, RangeSpec, check_key
from forebay.ports.clock import Clock, SystemClock

PIECE_BYTES = 8 << 20  # of a put, between two looks at whether its bytes are there
CHUNK_BYTES = 1 << 20  # one thread hand-over (about 60 us) per MiB costs 6 %; more would only delay the first byte
DIRECTORIES_KEPT = 8  # sorted name lists kept between pages: one per level of a usual tree
SETTLED_S = 2.0  # a directory changed later than this ago may change again within one tick of mtime: do not keep it


ResultT = TypeVar("ResultT")


class _Names(NamedTuple):
    """A directory's names in listing order, '/' after those of directories."""

    mtime_ns: int
    names: list[str]


def version_of(status: os.stat_result) -> str:
    """The version token of a file."""
    return f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"'


class DirectoryFetch:
    """A body from an open file; closing it closes the file."""

    def __init__(self, what: str, fd: int, info: ObjectInfo, start: int, end: int) -> None:
        self.info, self.start, self.end = info, start, end
        self._what, self._fd = what, fd

    async def __aiter__(self) -> AsyncIterator[bytes]:
        position = self.start
        while position < self.end and self._fd >= 0:
            chunk = await asyncio.to_thread(self._read, position)
            position += len(chunk)
            yield chunk
        await self.aclose()

    def _read(self, position: int) -> bytes:
        # A duplicate lives for this read only: closing the body meanwhile (a cancelled caller) must not hand the
        # number to another file while this thread reads from it.
        try:
            fd = os.dup(self._fd)
        except OSError as error:
            raise errors.from_os(error, self._what) from error
        try:
            chunk = os.pread(fd, min(CHUNK_BYTES, self.end - position), position)
            unchanged = version_of(os.fstat(fd)) == self.info.version
        except OSError as error:
            raise errors.from_os(error, self._what) from error
        finally:
            os.close(fd)
        if not unchanged:
            raise errors.changed(self._what)
        if not chunk:
            raise errors.ended_early(self._what, position - self.start, self.end - self.start)
        return chunk

    async def aclose(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class DirectoryBackend(Refusing):
    """See the module. There are no uploads: a put may have any size."""

    scheme = "file"
    read_only = False

    def __init__(self, root: str, clock: Clock | None = None, allows: AllowsPath = lambda path: True) -> None:
        self.root = root.rstrip("/") or "/"
        self._allows = allows
        self._clock = clock or SystemClock()
        self._kept: OrderedDict[str, _Names] = OrderedDict()
        self._unfinished = Unfinished(self.root.rstrip("/"))
        self._device = 0  # that the root was last seen on; 0: never seen

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> DirectoryFetch:
        check_key(key)
        what = self._what(key)
        fd, info = await asyncio.to_thread(self._open, key)
        try:
            if version and version != info.version:
                raise errors.changed(what)
            start, end = range.resolve(info.size_bytes) if range else (0, info.size_bytes)
        except BaseException:
            os.close(fd)
            raise
        return DirectoryFetch(what, fd, info, start, end)

    async def head(self, key: str) -> ObjectInfo:
        check_key(key)
        return await asyncio.to_thread(self._info, key)

    async def check(self, key: str, version: str) -> ObjectInfo | None:
        info = await self.head(key)
        return None if info.version == version else info

    async def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        return await asyncio.to_thread(self._page, prefix, delimiter, start_after, limit)

    def _page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        self._probe()
        self._unfinished.sweep()
        return pages.page(self, prefix, delimiter, start_after, limit)

    async def probe(self) -> None:
        await asyncio.to_thread(self._probe)

    async def aclose(self) -> None:
        self._kept.clear()

    # --- writing -----------------------------------------------------------------------------------------------------
    async def put(
        self, key: str, body: Body, *, headers: Headers = (), expect: str | None = None, tags: str = ""
    ) -> ObjectInfo:
        if tags:
            raise NotSupported(f"{self._what(key)}: a directory has no tags: leave them out, or use user metadata")
        file = await self._begin(key)
        try:
            if body.md5:
                file.hash()
            done = 0
            while done < body.size_bytes:
                end = min(done + PIECE_BYTES, body.size_bytes)
                await body.ready(end)
                await _finished(asyncio.to_thread(_take, file, body, done, end))
                done = end
            status = await _finished(asyncio.to_thread(file.publish, headers, expect, body.md5, version_of))
        finally:
            file.close()
        return self._describe(key, status, headers)

    async def _begin(self, key: str) -> NewFile:
        self._check_to_write(key)
        return await asyncio.to_thread(self._new, key)

    def _new(self, key: str) -> NewFile:
        self._probe()  # a root that is gone (an unmounted disk) is not made anew
        what = self._what(key)
        self._check(os.path.dirname(f"{self.root}/{key}"), what)
        self._unfinished.sweep()
        return NewFile(self.root, key, what, self._unfinished, lambda folder: self._check(folder, what))

    async def delete(self, key: str, *, expect: str | None = None) -> None:
        check_key(key)
        if expect == "":
            raise errors.expects_nothing(self._what(key))
        try:
            self._path(key)
        except NotFound:
            if expect:
                raise errors.changed(self._what(key)) from None
            return
        await asyncio.to_thread(self._remove, key, expect)

    def _remove(self, key: str, expect: str | None) -> None:
        self._probe()
        what = self._what(key)
        self._unfinished.sweep()
        newfile.remove(self.root, key, what, expect, version_of, lambda folder: self._check(folder, what))

    async def copy(
        self, source_key: str, key: str, *, source_version: str = "", headers: Headers | None = None
    ) -> ObjectInfo:
        check_key(source_key)
        return await asyncio.to_thread(self._copy, source_key, key, source_version, headers)

    def _copy(self, source_key: str, key: str, source_version: str, headers: Headers | None) -> ObjectInfo:
        self._check_to_write(key)
        fd, source = self._open(source_key)
        try:
            if source_version and source.version != source_version:
                raise errors.changed(self._what(source_key))
            file = self._new(key)
            try:
                file.append_from(fd, 0, source.size_bytes)
                if version_of(os.fstat(fd)) != source.version:
                    raise errors.changed(self._what(source_key))
                kept = source.headers if headers is None else headers
                return self._describe(key, file.publish(kept, None, "", version_of), kept)
            finally:
                file.close()
        finally:
            os.close(fd)

    def _check_to_write(self, key: str) -> None:
        check_key(key)
        try:
            self._path(key)
        except NotFound:
            raise Invalid(
                f"{self._what(key)}: a directory has no such name (empty, '.' or '..' between slashes, or NUL, or one "
                "of Forebay's own): choose another key",
                code="InvalidURI",
            ) from None

    # --- files -------------------------------------------------------------------------------------------------------
    def _what(self, key: str) -> str:
        return f"file://{self.root}/{key}"

    def _path(self, key: str) -> str:
        """The file that `key` names, or `NotFound`: such a key cannot exist here."""
        if "\0" in key or any(segment in ("", ".", "..") for segment in key.split("/")):
            raise errors.no_such_key(self._what(key))
        if any(newfile.is_temporary(segment) for segment in key.split("/")):
            raise errors.no_such_key(self._what(key))
        return f"{self.root}/{key}"

    def _open(self, key: str) -> tuple[int, ObjectInfo]:
        path = self._path(key)
        try:
            # Without O_NONBLOCK, opening a FIFO would wait for its writer.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            self._check(path, self._what(key))  # nor is said what is there
            raise self._failed(error, key) from error
        try:
            self._check(f"/proc/self/fd/{fd}", self._what(key))
            self._device = os.stat(self.root).st_dev
            return fd, self._describe(key, os.fstat(fd), newfile.kept_headers(fd))
        except BaseException:
            os.close(fd)
            raise

    def _info(self, key: str) -> ObjectInfo:
        path = self._path(key)
        self._check(path, self._what(key))
        try:
            status = os.stat(path)
            self._device = os.stat(self.root).st_dev
        except OSError as error:
            raise self._failed(error, key) from error
        return self._describe(key, status, newfile.kept_headers(path))

    def _describe(self, key: str, status: os.stat_result, headers: Headers) -> ObjectInfo:
        if not stat.S_ISREG(status.st_mode):
            raise errors.no_such_key(self._what(key))
        version = version_of(status)
        return ObjectInfo(key, status.st_size, version, version.strip('"'), status.st_mtime, headers)

    def _failed(self, error: OSError, key: str) -> Exception:
        if error.errno in (36, 40):  # ENAMETOOLONG, ELOOP: the file system has no such name
            return errors.no_such_key(self._what(key))
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            try:
                self._probe()
            except ForebayError as failed:
                return failed
        return errors.from_os(error, self._what(key))

    def _may_lead(self, path: str) -> bool:
        """Whether a path leads where this bucket may."""
        try:
            return self._allows(os.path.realpath(path))
        except OSError:  # a link in it went as it was read
            return False

    def _check(self, path: str, what: str) -> None:
        """`Denied` if a path leads where this bucket may not."""
        if not self._may_lead(path):
            raise Denied(
                f"{what or f'file://{self.root}'} leads to what this node keeps to itself, or does not allow: choose "
                "another, or name it without links",
                code="AccessDenied",
            )

    def _probe(self) -> None:
        self._check(self.root, "")
        try:
            known, device = self._device, os.stat(self.root).st_dev  # another thread may learn it meanwhile
            with os.scandir(self.root) as names:
                is_empty = device != known and next(names, None) is None
        except (FileNotFoundError, NotADirectoryError):
            raise errors.no_such_bucket(f"file://{self.root}") from None
        except OSError as error:
            raise errors.from_os(error, f"file://{self.root}") from error
        if is_empty and known:
            raise errors.no_such_bucket(f"file://{self.root} (empty, and on another disk than before)")
        self._device = device

    # --- listing -----------------------------------------------------------------------------------------------------
    def entries(self, prefix: str, after: str, from_key: str) -> Iterator[ListEntry]:
        """The walk that `pages.page` cuts from."""
        folder = prefix[: prefix.rfind("/") + 1]
        if any(segment in ("", ".", "..") for segment in folder.split("/")[:-1]) or "\0" in folder:
            return
        self._probe()
        yield from self._walk(folder, prefix, after, max(prefix, from_key), frozenset())

    def _walk(
        self, folder: str, prefix: str, after: str, from_key: str, above: frozenset[tuple[int, int]]
    ) -> Iterator[ListEntry]:
        """Files under `folder` ("" or ending in '/') in order: key begins with `prefix`, > `after`, >= `from_key`.

        `above`: the directories that this one lies in, by device and inode. A link back to one of them is a loop.
        """
        here, names = self._names(folder)
        if here in above:
            return
        above |= {here}
        low = max(after, from_key)
        # Every key of this folder below `low` comes before the name that `low` has at this level.
        first = bisect_left(names, low[len(folder) :].split("/")[0]) if low.startswith(folder) else 0
        for index in range(first, len(names)):
            key = folder + names[index]
            if not key.startswith(prefix) and key > prefix:
                return
            if key.endswith("/"):
                wanted = key.startswith(prefix) or prefix.startswith(key)
                if wanted and (key >= low or low.startswith(key)) and len(key) < limits.KEY_BYTES_MAX:
                    yield from self._walk(key, prefix, after, from_key, above)
            elif key > after and key >= from_key and key.startswith(prefix):
                entry = self._entry(key)
                if entry is not None:
                    yield entry

    def _entry(self, key: str) -> ListEntry | None:
        if len(key.encode()) > limits.KEY_BYTES_MAX:
            return None
        path = f"{self.root}/{key}"
        try:
            status = os.stat(path)
            has_names = status.st_nlink > 1 or Path(path).is_symlink()
        except OSError:
            return None  # gone since the directory was read, or a dangling link: not an object
        if not stat.S_ISREG(status.st_mode) or (has_names and not self._may_lead(path)):
            return None
        return ListEntry(key, status.st_size, version_of(status).strip('"'), status.st_mtime)

    def _names(self, folder: str) -> tuple[tuple[int, int], list[str]]:
        path = f"{self.root}/{folder}"
        if not self._may_lead(path):
            return (0, 0), []
        try:
            status = os.stat(path)
            here, mtime_ns = (status.st_dev, status.st_ino), status.st_mtime_ns
            kept = self._kept.get(folder)
            if kept and kept.mtime_ns == mtime_ns:
                return here, kept.names
            with os.scandir(path) as found:
                names = [entry.name + "/" if entry.is_dir() else entry.name for entry in found]
        except (FileNotFoundError, NotADirectoryError):
            return (0, 0), []  # gone since its parent was read
        except PermissionError as error:
            raise errors.from_os(error, self._what(folder)) from error
        except OSError as error:
            raise Unavailable(f"{self._what(folder)} cannot be listed: {error}: check the disk") from error
        names = sorted(name for name in names if (name.isascii() or _is_utf8(name)) and not newfile.is_temporary(name))
        if self._clock.wall_s() - mtime_ns / 1e9 > SETTLED_S:
            self._kept[folder] = _Names(mtime_ns, names)
            while len(self._kept) > DIRECTORIES_KEPT:
                self._kept.popitem(last=False)
        return here, names


def _take(file: NewFile, body: Body, start: int, end: int) -> None:
    """Append bytes `start` to `end` of a body."""
    if body.data is not None:
        file.append(memoryview(body.data)[start:end])
        return
    with open(body.path, "rb") as source:
        file.append_from(source.fileno(), body.offset + start, end - start)


async def _finished(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """`work` in a thread to its end, also when the caller is cancelled: its file may not be closed under it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
        raise


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
