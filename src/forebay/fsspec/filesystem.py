"""`forebay://bucket/key` for fsspec: programs that open files through fsspec read and write a node.

Theory. A path is a bucket and a key. The node is an option of the filesystem (or FOREBAY_URL), so a path means the same
object on every host, each of which may have its own node. There are no directories: a path is one if it is a bucket, or
if a key begins with it and a slash. Each operation is a flow of the clients. This module adds paths, fsspec's
conventions, and fewer round trips: a batch for many reads, one listing for a tree. Where fsspec takes any error for
"not there", ours are raised: a node that does not answer is no empty bucket.

Listings are kept for `listings_expiry_time` seconds (default LISTING_KEPT_S), since readers of datasets look up each
file after they have listed it. Changes of this process are forgotten at once. Opening a file always asks the node.

Rejected: `forebay://HOST:PORT/bucket/key` (fsspec strips a path of its host without knowing the instance, so a path for
another node would silently read here; a bucket's name holds no colon, so it is refused). Making a bucket for a path
whose bucket is missing (a typing error would become a bucket on one node). Deleting buckets by `rm`.

Invariants. (1) Errors are `OSError`s (`fsspec/errors.py`). (2) An instance, and its pickle, is one node with one
identity: the environment's values are part of what tells instances apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from fsspec.asyn import AsyncFileSystem, get_loop, sync_wrapper
from fsspec.callbacks import DEFAULT_CALLBACK, Callback
from fsspec.compression import compr
from fsspec.config import apply_config
from fsspec.core import get_compression
from fsspec.spec import AbstractFileSystem
from fsspec.utils import stringify_path, tokenize

from forebay.client import flows
from forebay.client.calling import DEFAULT_URL
from forebay.client.upload import PutOptions
from forebay.core import limits
from forebay.core.errors import ForebayError, Invalid, NotFound
from forebay.core.messages.batch import FULL, Item
from forebay.core.types import LOCAL_URL, Bucket, RangeSpec
from forebay.fsspec.clients import Clients
from forebay.fsspec.errors import as_os_error, told
from forebay.fsspec.files import (
    BUFFER_BYTES,
    AsyncReadFile,
    AsyncWriteFile,
    CachedFile,
    CompressedFile,
    ReadFile,
    WriteFile,
    open_append,
    open_raw,
)
from forebay.fsspec.listing import Info, Listing, Tree, directory, in_order, of_entry, of_head
from forebay.fsspec.ranges import bytes_or_error, listed, shares, told_all

T = TypeVar("T")
LISTING_KEPT_S = 10.0
AT_ONCE = limits.CLIENT_IDLE_CONNECTIONS_MAX  # requests of one call under way: as many connections are kept
_MEANS_ENDPOINT = {"url", "endpoint", "host", "base_url"}  # else they would be passed over, and another node be asked
_ENVIRONMENT = {"endpoint_url": "FOREBAY_URL", "token": "FOREBAY_TOKEN", "ca": "FOREBAY_CA"}


class _OnePerNode(type(AbstractFileSystem)):  # type: ignore[misc]
    """Instances are kept by their arguments: those that the environment gives are arguments, too."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        kwargs = apply_config(cls, kwargs)
        for name, variable in _ENVIRONMENT.items():
            if kwargs.get(name) is None:
                kwargs.pop(name, None)
                if os.environ.get(variable):
                    kwargs[name] = os.environ[variable]
        kwargs.setdefault("endpoint_url", DEFAULT_URL)
        return super().__call__(*args, **kwargs)


def split(path: str) -> tuple[str, str]:
    """Bucket and key of a path without its protocol; either may be empty."""
    bucket, _, key = path.partition("/")
    if ":" in bucket:
        raise as_os_error(
            Invalid(
                f"{bucket!r} is no bucket: write forebay://BUCKET/KEY, and name the node by FOREBAY_URL or by "
                f'storage_options={{"endpoint_url": "http://{bucket}"}}'
            ),
            path,
        )
    return bucket, key


class ForebayFileSystem(AsyncFileSystem, metaclass=_OnePerNode):  # type: ignore[misc]
    """A node's buckets. `endpoint_url`, `token`, `ca`, `patience_s`: as of `forebay.connect`, environment included.

    With `asynchronous=True` its coroutines (`_cat_file`, …) run on your loop; end with `await fs.aclose()`.
    `listings_expiry_time`, `use_listings_cache`, `max_paths`: how long listings are kept, and whether.
    Share it between threads; it goes on in forked children, and can be pickled.
    """

    protocol = ("forebay",)

    def __init__(
        self,
        *,
        endpoint_url: str | None = None,
        token: str | None = None,
        ca: str | None = None,
        patience_s: float | None = None,
        use_listings_cache: bool = True,
        listings_expiry_time: float | None = LISTING_KEPT_S,
        max_paths: int | None = None,
        asynchronous: bool = False,
        loop: Any = None,
        batch_size: int | None = AT_ONCE,
        **others: Any,
    ) -> None:
        if meant := _MEANS_ENDPOINT.intersection(others):
            raise TypeError(f"{meant.pop()!r} is no option of this filesystem: the node's URL is endpoint_url")
        self._pid = os.getpid()  # what else there is is for other filesystems: libraries pass everything to each
        super().__init__(
            asynchronous=asynchronous,
            loop=loop,
            batch_size=batch_size,
            use_listings_cache=use_listings_cache,
            listings_expiry_time=listings_expiry_time,
            max_paths=max_paths,
        )
        with told(endpoint_url or ""):
            self._clients = Clients(endpoint_url, token, ca, patience_s)
        self.url = self._clients.blocking.url
        weakref.finalize(self, self._clients.let_go)

    @property
    def loop(self) -> Any:
        """fsspec's loop; in a forked child its new one."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            if not self.asynchronous:
                self._loop = get_loop()
        return self._loop

    @property
    def fsid(self) -> str:
        return f"forebay:{self.url}"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        path = stringify_path(path)
        for start in ("forebay://", "forebay::"):
            path = path.removeprefix(start)
        return path.strip("/") if path.startswith("/") else path.rstrip("/")

    def _object(self, path: str) -> tuple[str, str]:
        """Bucket and key, both."""
        bucket, key = split(self._strip_protocol(path))
        if not key:
            raise IsADirectoryError(errno.EISDIR, "this names no object: write forebay://BUCKET/KEY", path)
        return bucket, key

    async def aclose(self) -> None:
        """Close what is open; the filesystem stays usable."""
        await self._clients.aclose()

    close = sync_wrapper(aclose)

    async def _run(self, flow: flows.Flow[T]) -> T:
        return await self._clients.on_loop.run(flow)

    async def _each(self, calls: Iterable[Callable[[], Any]]) -> None:
        """Make all calls, AT_ONCE at a time; the first error ends it."""
        waiting = iter(calls)

        async def work() -> None:
            for call in waiting:
                await call()

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())

    # --- what is there -----------------------------------------------------------------------------------------------
    async def _info(self, path: str, refresh: bool = False, **_: Any) -> Info:
        path = self._strip_protocol(path)
        bucket, key = split(path)
        if not bucket:
            return directory("")
        if not key:
            with told(path):
                await self._run(flows.bucket(bucket))
            return directory(path)
        kept = None if refresh else self._kept(self._parent(path))
        if kept is not None and path in kept:
            return dict(kept[path])
        with told(path):
            try:
                return of_head(path, await self._run(flows.head(bucket, key)))
            except NotFound as error:
                page = await self._run(flows.list_page(bucket, key + "/", "", "", 1))
                if page.entries or page.prefixes:
                    return directory(path)
                raise NotFound(error.message, code=error.code) from None

    async def _type(self, path: str) -> str:
        """`file`, `directory` or nothing; any error but that it is not there is raised."""
        try:
            return str((await self._info(path))["type"])
        except FileNotFoundError:
            return ""

    async def _isfile(self, path: str) -> bool:
        return await self._type(path) == "file"

    async def _isdir(self, path: str) -> bool:
        return await self._type(path) == "directory"

    async def _ls(self, path: str, detail: bool = True, refresh: bool = False, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        found = None if refresh else self._kept(path)
        if found is None:
            found = in_order(await self._list(path))
            if not found and split(path)[1]:
                info = await self._info(path, refresh=True)  # of a directory there may be a marker, and nothing else
                found = in_order([info] if info["type"] == "file" else [])
            else:
                self.dircache[path] = found
        return [dict(info) for info in found.values()] if detail else list(found)

    def _kept(self, path: str) -> Listing | None:
        try:
            kept: Listing = self.dircache[path]
        except KeyError:
            return None
        return kept

    async def _list(self, path: str, prefix: str = "") -> list[Info]:
        """What lies directly in `path`; with `prefix` only what begins with that."""
        bucket, key = split(path)
        with told(path):
            if not bucket:
                names = [found.name for found in await self._run(flows.buckets())]
                return [directory(name) for name in names if name.startswith(prefix)]
            under = f"{key}/" if key else ""
            found: list[Info] = []
            async for page in self._clients.on_loop.list_pages(bucket, under + prefix, delimiter="/"):
                found += [directory(f"{bucket}/{name}".removesuffix("/")) for name in page.prefixes]
                found += [of_entry(bucket, entry) for entry in page.entries if entry.key != under]
        return found

    async def _walk(
        self, path: str, maxdepth: int | None = None, topdown: bool = True, on_error: Any = "omit", **options: Any
    ) -> AsyncIterator[Any]:
        if on_error == "omit":
            on_error = _omit
        async for found in super()._walk(path, maxdepth, topdown, on_error, **options):
            yield found

    async def _find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        prefix: str = "",
        **_: Any,
    ) -> Any:
        path = self._strip_protocol(path)
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        try:
            if maxdepth is None and path:
                found = await self._tree(path, prefix)
            else:
                found = await self._levels(path, maxdepth, prefix)
            if not found and not prefix:
                info = await self._info(path)
                found = [info] if info["type"] == "file" else []
        except FileNotFoundError:
            found = []
        if withdirs and path and found and found[0]["name"] != path:
            found.append(directory(path))
        listing = in_order(info for info in found if withdirs or info["type"] == "file")
        return listing if detail else list(listing)

    async def _tree(self, path: str, prefix: str) -> list[Info]:
        """All that lies under `path`, by one listing. What it says of each directory is kept, if it is all of it."""
        bucket, key = split(path)
        tree = Tree(path)
        with told(path):
            async for page in self._clients.on_loop.list_pages(bucket, (f"{key}/" if key else "") + prefix):
                for entry in page.entries:
                    tree.add(bucket, entry)
        if not prefix:
            for folder, listing in tree.listings():
                self.dircache[folder] = listing
        return tree.all()

    async def _levels(self, path: str, maxdepth: int | None, prefix: str) -> list[Info]:
        """What lies under `path`, so many levels deep."""
        found = await self._list(path, prefix) if prefix else await self._ls(path)
        folders = [info["name"] for info in found if info["type"] == "directory" and info["name"] != path]
        if maxdepth != 1:
            deeper = None if maxdepth is None else maxdepth - 1
            for folder in folders:
                found += await self._levels(folder, deeper, "") if deeper or not path else await self._tree(folder, "")
        return found

    async def _du(self, path: str, total: bool = True, maxdepth: int | None = None, **options: Any) -> Any:
        found = await self._find(path, maxdepth=maxdepth, detail=True, **options)
        sizes = {name: info["size"] for name, info in found.items()}
        return sum(sizes.values()) if total else sizes

    async def _modified(self, path: str) -> datetime:
        """When the object was last written; `created` is the same, since an object is only ever written whole."""
        info = await self._info(path, refresh=True)
        if info["type"] != "file":
            raise IsADirectoryError(errno.EISDIR, "directories have no times: ask for an object's", path)
        found: datetime = info["last_modified"]
        return found

    modified = sync_wrapper(_modified)
    created = sync_wrapper(_modified)

    async def _ukey(self, path: str) -> str:
        info = await self._info(path, refresh=True)
        return str(tokenize(self.url, info["name"], info["type"], info.get("etag") or info.get("mtime"), info["size"]))

    async def _checksum(self, path: str) -> int:
        return int(await self._ukey(path), 16)

    ukey = sync_wrapper(_ukey)
    checksum = sync_wrapper(_checksum)

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget listings: all of them, or those that `path` is in."""
        if path is None:
            self.dircache.clear()
        else:
            path = self._strip_protocol(path)
            while True:
                self.dircache.pop(path, None)
                if not path:
                    break
                path = self._parent(path)
        super().invalidate_cache(path)

    def _changed(self, path: str) -> None:
        """This process has changed what is at `path`."""
        self.invalidate_cache(path)
        bucket, key = split(self._strip_protocol(path))
        self._clients.blocking.changed(bucket, key)

    # --- reading -----------------------------------------------------------------------------------------------------
    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, etag: str = "", **_: Any
    ) -> bytes:
        bucket, key = self._object(path)
        start, end = await self._span(path, start, end)
        if end is not None and end <= start:
            return b""
        span = RangeSpec(start, None if end is None else end - 1) if start or end is not None else None
        with told(path):
            try:
                return await self._clients.on_loop.get(bucket, key, range=span, etag=etag)
            except Invalid as error:
                if error.code == "InvalidRange":
                    return b""
                raise

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, etag: str = "", **_: Any) -> bytes:
        """The object's bytes, or those of [start, end); negative numbers count from its end."""
        if (start or 0) < 0 or (end or 0) < 0:
            start, end = self._sync(self._span, path, start, end)
        bucket, key = self._object(path)
        with told(path):
            (found,) = self._clients.blocking.get_many(
                [Item(bucket, key, start or 0, end, "", etag)], on_error="report"
            )
            if isinstance(found, ForebayError) and found.code == FULL:
                return self._clients.blocking.get(bucket, key, etag=etag)
        data = bytes_or_error(path, found)
        if isinstance(data, OSError):
            raise data
        return data

    def _sync(self, call: Any, *args: Any) -> Any:
        return sync_wrapper(call, obj=self)(*args)

    async def _span(self, path: str, start: int | None, end: int | None) -> tuple[int, int | None]:
        """The range without negative numbers, which count from the end."""
        if (start or 0) < 0 or (end or 0) < 0:
            size_bytes = (await self._info(path, refresh=True))["size"]
            start = max(0, size_bytes + start) if start and start < 0 else start
            end = max(0, size_bytes + end) if end and end < 0 else end
        return start or 0, end

    async def _cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        batch_size: int | None = None,
        on_error: str = "return",
        **_: Any,
    ) -> list[Any]:
        items = await self._items(paths, starts, ends)
        if self.asynchronous:
            results = [one for share in shares(items) for one in await self._many(share)]
        else:
            results = await asyncio.to_thread(self._many_here, items)
        return told_all(paths, results, on_error)

    def cat_ranges(
        self, paths: list[str], starts: Any, ends: Any, max_gap: int | None = None, on_error: str = "return", **_: Any
    ) -> list[Any]:
        """Many ranges in few round trips, in their order: bytes, or with `on_error="return"` the error in its place.

        `starts` and `ends` are lists, or one number for all. `max_gap` has nothing to do here: ranges need no merging.
        """
        if any((number or 0) < 0 for numbers in (starts, ends) for number in listed(numbers, len(paths))):
            items = self._sync(self._items, paths, starts, ends)
        else:
            items = self._plain_items(paths, starts, ends)
        return told_all(paths, self._many_here(items), on_error)

    def _plain_items(self, paths: list[str], starts: Any, ends: Any) -> list[Item]:
        if not isinstance(paths, list):
            raise TypeError("paths is no list: give one path for each range")
        starts, ends = listed(starts, len(paths)), listed(ends, len(paths))
        if len(starts) != len(paths) or len(ends) != len(paths):
            raise ValueError("as many starts and ends as paths are needed")
        names = {path: self._object(path) for path in set(paths)}
        return [Item(*names[path], start or 0, end) for path, start, end in zip(paths, starts, ends, strict=True)]

    async def _items(self, paths: list[str], starts: Any, ends: Any) -> list[Item]:
        found = []
        for path, item in zip(paths, self._plain_items(paths, starts, ends), strict=True):
            found.append(Item(item.bucket, item.key, *await self._span(path, item.start, item.end)))
        return found

    async def _many(self, items: Sequence[Item]) -> list[Any]:
        with told(f"{items[0].bucket}/{items[0].key}"):
            many = await self._clients.on_loop.get_many(items, on_error="report")
        return [result if isinstance(result, bytes | ForebayError) else bytes(result) for result in many]

    def _many_here(self, items: Sequence[Item]) -> list[Any]:
        found: list[Any] = []
        for share in shares(items):
            with told(f"{share[0].bucket}/{share[0].key}"):
                many = self._clients.blocking.get_many(share, on_error="report")
            found += [result if isinstance(result, bytes | ForebayError) else bytes(result) for result in many]
        return found

    async def _cat(
        self, path: Any, recursive: bool = False, on_error: str = "raise", batch_size: int | None = None, **options: Any
    ) -> Any:
        paths = await self._expand_path(path, recursive=recursive)
        if recursive:
            paths = [one for one in paths if not await self._isdir(one)]
        if len(paths) == 1 and not isinstance(path, list) and paths[0] == self._strip_protocol(path):
            return await self._cat_file(paths[0], **options)
        results = await self._cat_ranges(paths, 0, None, on_error="raise" if on_error == "raise" else "return")
        return {
            one: data
            for one, data in zip(paths, results, strict=True)
            if on_error != "omit" or not isinstance(data, Exception)
        }

    async def _get_file(self, rpath: str, lpath: Any, callback: Callback = DEFAULT_CALLBACK, **_: Any) -> None:
        if hasattr(lpath, "write"):
            lpath.write(await self._cat_file(rpath))
            return
        bucket, key = split(self._strip_protocol(rpath))
        if os.path.isdir(lpath) or not key:
            return
        told_bytes = [0]

        def progress(done: int, size: int) -> None:
            callback.set_size(size)
            callback.relative_update(done - told_bytes[0])
            told_bytes[0] = done

        try:
            with told(rpath):
                await asyncio.to_thread(self._clients.blocking.download, bucket, key, lpath, progress=progress)
        except FileNotFoundError:
            if not await self._isdir(rpath):
                raise
            os.makedirs(lpath, exist_ok=True)

    # --- writing -----------------------------------------------------------------------------------------------------
    async def _pipe_file(
        self,
        path: str,
        value: Any,
        mode: str = "overwrite",
        content_type: str = "",
        metadata: dict[str, str] | None = None,
        **_: Any,
    ) -> None:
        bucket, key = self._object(path)
        new = mode == "create"
        try:
            with told(path, new=new):
                await self._clients.on_loop.put(
                    bucket, key, value, only_new=new, content_type=content_type, metadata=metadata
                )
        finally:
            self._changed(path)

    async def _put_file(
        self,
        lpath: str,
        rpath: str,
        mode: str = "overwrite",
        callback: Callback = DEFAULT_CALLBACK,
        content_type: str = "",
        metadata: dict[str, str] | None = None,
        **_: Any,
    ) -> None:
        if os.path.isdir(lpath):
            return
        bucket, key = self._object(rpath)
        new = mode == "create"
        callback.set_size(os.path.getsize(lpath))
        try:
            with told(rpath, new=new):
                await asyncio.to_thread(
                    self._clients.blocking.put,
                    *(bucket, key, os.fspath(lpath)),
                    only_new=new,
                    content_type=content_type,
                    metadata=metadata,
                    progress=callback.relative_update,
                )
        finally:
            self._changed(rpath)

    async def _cp_file(self, path1: str, path2: str, **_: Any) -> None:
        source, target = split(self._strip_protocol(path1)), self._object(path2)
        if not source[1]:
            return
        try:
            with told(path1):
                await self._clients.on_loop.copy(*source, *target)
        except FileNotFoundError:
            if not await self._isdir(path1):  # a directory is copied by copying what is in it
                raise
        finally:
            self._changed(path2)

    async def _touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        """Make an empty object; with `truncate=False` only if there is none."""
        if truncate:
            await self._pipe_file(path, b"")
            return
        try:
            await self._pipe_file(path, b"", mode="create")
        except FileExistsError:
            raise NotImplementedError("an object's time is that of its last write: copy it, or truncate it") from None

    touch = sync_wrapper(_touch)

    async def _rm_file(self, path: str, **_: Any) -> None:
        bucket, key = self._object(path)
        with told(path):
            try:
                await self._run(flows.head(bucket, key))
            except NotFound:
                if await self._isdir(path):
                    raise IsADirectoryError(errno.EISDIR, "a directory: delete it with recursive=True", path) from None
                raise
        await self._delete(bucket, key)

    async def _delete(self, bucket: str, key: str) -> None:
        path = f"{bucket}/{key}"
        try:
            with told(path):
                await self._run(flows.delete(bucket, key))
        finally:
            self._changed(path)

    async def _rm(
        self,
        path: Any,
        recursive: bool = False,
        batch_size: int | None = None,
        maxdepth: int | None = None,
        **_: Any,
    ) -> None:
        """Delete objects; a bucket stays, empty."""
        if recursive and maxdepth is None:
            for one in await self._expand_path(path):
                await self._rm_tree(one)
            return
        paths = await self._expand_path(path, recursive=recursive, maxdepth=maxdepth)
        if recursive:
            paths = [one for one in paths if await self._isfile(one)]
        await _first_error(self._each([partial(self._rm_file, one) for one in paths]))

    async def _rm_tree(self, path: str) -> None:
        """Delete all keys that begin with the path and a slash, what stands for directories too, and the path's own."""
        bucket, key = split(path)
        if not bucket:
            raise as_os_error(Invalid("this would delete everything in all buckets: name one"), path)
        deleted = 0
        with told(path):
            if key and await self._isfile(path):
                await self._delete(bucket, key)
                deleted += 1
            async for page in self._clients.on_loop.list_pages(bucket, f"{key}/" if key else ""):
                keys = [entry.key for entry in page.entries]
                deleted += len(keys)
                await _first_error(self._each([partial(self._delete, bucket, one) for one in keys]))
        if not deleted and key:
            raise FileNotFoundError(errno.ENOENT, "nothing is there to delete", path)

    async def _mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Make a bucket, on this node alone, if `path` is one and the node lets you; under a bucket directories come
        with their objects, and there is nothing to make."""
        path = self._strip_protocol(path)
        bucket, key = split(path)
        found = await self._type(bucket)
        if key and not found:
            raise FileNotFoundError(errno.ENOENT, f"there is no bucket {bucket}: make it first", path)
        if not key and found:
            raise FileExistsError(errno.EEXIST, "there is a bucket of this name", path)
        if key and await self._type(path) == "file":
            raise FileExistsError(errno.EEXIST, "there is an object of this name", path)
        if not key:
            with told(path):
                await self._run(flows.bucket_put(Bucket(bucket, LOCAL_URL, write="local"), check=False))
            self.invalidate_cache("")

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        path = self._strip_protocol(path)
        if not exist_ok and await self._type(path):
            raise FileExistsError(errno.EEXIST, "this is there already", path)
        try:
            await self._mkdir(path)
        except FileExistsError:
            if not exist_ok or await self._isfile(path):
                raise

    async def _rmdir(self, path: str) -> None:
        """Forget a bucket, or the marker of a directory, if nothing is in it."""
        path = self._strip_protocol(path)
        bucket, key = split(path)
        marker = f"{key}/" if key else ""
        with told(path):
            page = await self._run(flows.list_page(bucket, marker, "", "", 2))
            if [entry for entry in page.entries if not key or entry.key != marker]:
                raise OSError(errno.ENOTEMPTY, "there are objects in it: delete them with rm(recursive=True)", path)
            if not key:
                await self._run(flows.bucket_delete(bucket))
            elif page.entries:
                await self._run(flows.delete(bucket, marker))
            else:
                raise NotFound("there is no such directory")
        self.invalidate_cache(path)

    rmdir = sync_wrapper(_rmdir)

    def sign(self, path: str, expiration: int = 100, **_: Any) -> str:
        """Not supported."""
        raise NotImplementedError(
            "URLs are not signed here: presign one for the node's S3 side, with its endpoint and your S3 keys"
        )

    # --- files -------------------------------------------------------------------------------------------------------
    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: dict[str, Any] | None = None,
        compression: str | None = None,
        **options: Any,
    ) -> Any:
        """As of every filesystem. What compresses closes the file below it, which others leave to chance."""
        packed = compression and get_compression(path, compression)
        if not packed or "b" not in mode or "r" in mode:
            return super().open(path, mode, block_size, cache_options, compression, **options)
        file = super().open(path, mode, block_size, cache_options, **options)
        return CompressedFile(file, compr[packed](file, mode="w"))

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        cache_type: str | None = None,
        etag: str = "",
        content_type: str = "",
        metadata: dict[str, str] | None = None,
        **_: Any,
    ) -> Any:
        """`rb`, `wb`, `xb` (fails where there is an object) and `ab` (to APPEND_BYTES_MAX); see
        `fsspec/files.py`. With `etag` exactly that version is read, or replaced."""
        bucket, key = self._object(path)
        client = self._clients.blocking
        if mode == "rb":
            raw = open_raw(client, bucket, key, etag)
            if cache_type is None and not cache_options:
                return ReadFile(self, path, raw, min(block_size or BUFFER_BYTES, limits.MIB))
            options = {"block_size": block_size, "cache_type": cache_type or "readahead"}
            return CachedFile(self, path, raw, cache_options=cache_options, **options)
        if mode == "ab":
            return open_append(self, path, client, bucket, key, autocommit=autocommit)
        if mode not in ("wb", "xb"):
            raise ValueError(
                f"mode {mode!r} is not known here: objects are read (rb), written (wb, xb) or appended (ab)"
            )
        if mode == "xb":
            with told(path), contextlib.suppress(NotFound):
                client.head(bucket, key)
                raise FileExistsError(errno.EEXIST, "there is an object of this name", path)
        new = PutOptions.of(content_type, metadata, etag, mode == "xb")
        return WriteFile(self, path, client, bucket, key, new, autocommit=autocommit)

    async def open_async(self, path: str, mode: str = "rb", **options: Any) -> AsyncReadFile | AsyncWriteFile:
        """A file whose `read`, `write` and `close` are coroutines; modes `rb`, `wb` and `xb`."""
        if "b" not in mode or options.get("compression"):
            raise ValueError("files are binary here: decode or decompress what you read")
        path = self._strip_protocol(path)
        if mode != "rb":
            if mode == "xb" and await self._exists(path):
                raise FileExistsError(errno.EEXIST, "there is an object of this name", path)
            bucket, key = self._object(path)
            if mode not in ("wb", "xb"):
                raise ValueError(f"mode {mode!r} is not known here: use rb, wb or xb")
            new = PutOptions.of("", None, "", mode == "xb")
            return AsyncWriteFile(WriteFile(self, path, self._clients.blocking, bucket, key, new))
        info = await self._info(path, refresh=True)
        if info["type"] != "file":
            raise IsADirectoryError(errno.EISDIR, "this is no object", path)
        return AsyncReadFile(self, path, info["size"], info["etag"])


def _omit(error: OSError) -> None:
    """For `walk`: a directory that is gone is left out; a node that does not answer is no empty directory."""
    if not isinstance(error, FileNotFoundError):
        raise error


async def _first_error(work: Any) -> None:
    """Await a group of tasks; of what failed, raise the first."""
    try:
        await work
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
