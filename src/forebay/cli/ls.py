"""`forebay ls`: as `aws s3 ls`, and what of it is cached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli import address, show
from forebay.cli.complete import addresses
from forebay.cli.options import AsJson, Debug, Url, open_client
from forebay.cli.outcome import one_line, verb
from forebay.core.errors import Invalid, NotFound
from forebay.core.messages.calls import CachedEntry
from forebay.core.types import ListEntry

if TYPE_CHECKING:
    from forebay.client.sync import Client

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("ls")
@verb
def ls(
    where: Annotated[
        str | None, typer.Argument(metavar="[ADDRESS]", autocompletion=addresses, help="Bucket, or bucket and prefix.")
    ] = None,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="All keys, not one level.")] = False,
    long: Annotated[bool, typer.Option("--long", "-l", help="Show what of each object is cached.")] = False,
    cached: Annotated[bool, typer.Option("--cached", help="Only what is cached; the backend is not asked.")] = False,
    members: Annotated[bool, typer.Option("--members", help="The files in a shard (tar, zip).")] = False,
    human: Annotated[bool, typer.Option("--human", "-h", help="Sizes as 1.5 MiB instead of bytes.")] = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List buckets, or the objects of one.

    With --json one line for each: {"key", "size_bytes", "etag", "modified_s"} or {"prefix"}; with -l or --cached also
    cached_bytes, pinned and dirty. With --members {"member", "size_bytes"}.
    """
    with open_client(url) as client:
        if members:
            if where is None or recursive or long or cached:
                raise Invalid("--members lists one shard: name it, as in `forebay ls --members BUCKET/SHARD`")
            _members(client, address.parse_object(where), human=human, as_json=as_json)
            return
        if where is None:
            if recursive or long or cached:
                raise Invalid("-r, -l and --cached list objects: name a bucket, as in `forebay ls -r BUCKET`")
            _buckets(client, as_json=as_json)
            return
        at = address.parse(where)
        delimiter = "" if recursive else "/"
        pages = _cached_pages(client, at, delimiter) if cached else _pages(client, at, delimiter, long=long)
        strip = 0 if recursive else at.key.rfind("/") + 1
        count = 0
        for prefixes, entries in pages:
            count += len(prefixes) + len(entries)
            for prefix in prefixes:
                show.line({"prefix": prefix}) if as_json else print(f"{'PRE':>30} {one_line(prefix[strip:])}")
            for entry in entries:
                show.line(_fields(entry)) if as_json else print(_row(entry, strip, human=human))
    if not count and at.key:
        where_found = "in the cache " if cached else ""
        raise NotFound(f"nothing {where_found}begins with {at}: see `forebay ls {at.bucket}/`", code="NoSuchKey")


def _members(client: Client, at: address.Address, *, human: bool, as_json: bool) -> None:
    for name, size_bytes in client.members(at.bucket, at.key):
        name = name.encode("utf-8", "replace").decode()
        if as_json:
            show.line({"member": name, "size_bytes": size_bytes})
        else:
            print(f"{show.size(size_bytes) if human else size_bytes:>10} {one_line(name)}")


def _buckets(client: Client, *, as_json: bool) -> None:
    for bucket in client.buckets():
        if as_json:
            show.line({"bucket": bucket.name, "url": bucket.url, "created_s": bucket.created_s})
        else:
            print(f"{show.moment(bucket.created_s):19} {bucket.name}")


Entries = list[ListEntry] | list[CachedEntry]


def _pages(client: Client, at: address.Address, delimiter: str, *, long: bool) -> Iterator[tuple[list[str], Entries]]:
    known = _Cached(client, at, delimiter) if long else None
    for page in client.list_pages(at.bucket, at.key, delimiter=delimiter):
        yield page.prefixes, [known.with_state(entry) for entry in page.entries] if known else page.entries


def _cached_pages(client: Client, at: address.Address, delimiter: str) -> Iterator[tuple[list[str], Entries]]:
    after = ""
    while True:
        page = client.cached_page(at.bucket, at.key, delimiter=delimiter, start_after=after)
        yield page.prefixes, page.entries
        if not page.next_after:
            return
        after = page.next_after


class _Cached:
    """The index's listing beside the backend's: both are in byte order, so one pass joins them."""

    def __init__(self, client: Client, at: address.Address, delimiter: str) -> None:
        self._entries = (entry for _, entries in _cached_pages(client, at, delimiter) for entry in entries)
        self._next: ListEntry | CachedEntry | None = next(self._entries, None)

    def with_state(self, entry: ListEntry) -> CachedEntry:
        wanted = entry.key.encode()
        while self._next is not None and self._next.key.encode() < wanted:
            self._next = next(self._entries, None)
        found = self._next
        if isinstance(found, CachedEntry) and found.key == entry.key and found.size_bytes == entry.size_bytes:
            return CachedEntry(*entry, found.cached_bytes, found.pinned, found.dirty)
        return CachedEntry(*entry, 0)


def _fields(entry: ListEntry | CachedEntry) -> dict[str, object]:
    if isinstance(entry, ListEntry):
        return entry._asdict()
    return {name: getattr(entry, name) for name in entry.__struct_fields__}


def _row(entry: ListEntry | CachedEntry, strip: int, *, human: bool) -> str:
    size = show.size(entry.size_bytes) if human else str(entry.size_bytes)
    state = f" {_state(entry):>8}" if isinstance(entry, CachedEntry) else ""
    return f"{show.moment(entry.modified_s)} {size:>10}{state} {one_line(entry.key[strip:])}"


def _state(entry: CachedEntry) -> str:
    """`cached`, `37 %`, `-`; a `+` for what is pinned, `*` for what the backend has not yet."""
    if entry.cached_bytes >= entry.size_bytes and (entry.cached_bytes or entry.pinned):
        word = "cached"
    elif not entry.cached_bytes:
        word = "-"
    else:
        word = f"{min(99, 100 * entry.cached_bytes // entry.size_bytes)} %"
    return word + ("+" if entry.pinned else "") + ("*" if entry.dirty else "")
