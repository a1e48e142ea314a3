"""Listings as S3 gives them, read truly (S3 and compatible services, and Google's XML API, which speaks the same).

Theory. S3 lists in the byte order of keys and can start after any key, so each page is one request and nothing is kept
between pages. The answer is not trusted to keep its promises: what lies outside the prefix or at or below the position
is dropped, pages longer than asked are cut, and an answer whose keys do not rise is refused.

SeaweedFS, which keeps directories, lists `a/b` before `a.txt`, as if '/' were the lowest character. It says who it is,
so its pages are taken in that order and nothing is left out or repeated, but only each page by itself is in byte order.
It also takes a key `foo` and the folder `foo/` for one thing and goes on behind both, so what lies below the key that a
page starts after is asked for by itself.
S3 Express directory buckets have no order at all and are refused (`NotSupported`): paging would leave objects out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import datetime
from urllib.parse import unquote
from xml.etree import ElementTree

from forebay.backends import errors
from forebay.backends.pages import HIGHEST, check_limit
from forebay.backends.wire import Wire
from forebay.core.errors import NotSupported, Unavailable
from forebay.core.types import ListEntry, ListPage

Order = Callable[[str], str]  # sorts keys as the server lists them


def list_page(wire: Wire, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
    """The page after `start_after`; see `Backend.list_page`. Blocks."""
    check_limit(limit)
    token = ""
    while True:
        query = [("list-type", "2"), ("encoding-type", "url"), ("max-keys", str(limit))]
        # A position above the prefix means nothing, but would confuse SeaweedFS.
        sent_after = "" if prefix != start_after and prefix.startswith(start_after) else start_after
        for name, value in (("prefix", prefix), ("delimiter", delimiter), ("start-after", sent_after)):
            if value:
                query.append((name, value))
        if token:
            query.append(("continuation-token", token))
        answer = wire.ask(query)
        root = parse(answer.status, answer.body, wire.url, "ListBucketResult")
        keeps_folders = answer.headers.get("server", "").startswith("SeaweedFS")
        order = _path_order if keeps_folders else str
        page = _read_page(root, order, prefix, start_after, wire.url)
        if keeps_folders and sent_after and not token:
            page, is_all = _with_what_is_below(wire, page, prefix, delimiter, start_after, limit)
            if is_all:
                return page
        if len(page.entries) + len(page.prefixes) > limit:
            return cut(page, limit, order)
        is_full = len(page.entries) + len(page.prefixes) == limit
        if keeps_folders and is_full:
            return page  # what lies below its last key may follow, whatever the answer says
        if (root.findtext("{*}IsTruncated") or "").strip().lower() != "true":
            return ListPage(page.entries, page.prefixes)
        if page.next_after:  # fewer than asked is allowed
            return page
        token = root.findtext("{*}NextContinuationToken") or ""
        if not token:
            raise Unavailable(f"{wire.url}: an empty page says that more follows, but not where: try again")


def _with_what_is_below(
    wire: Wire, page: ListPage, prefix: str, delimiter: str, start_after: str, limit: int
) -> tuple[ListPage, bool]:
    """`page` and what SeaweedFS left out of it: the folder of the name that it starts after. True: that fills it."""
    folder = start_after + "/"
    if start_after.endswith(HIGHEST) or not folder.startswith(prefix):
        return page, False
    if delimiter and delimiter in start_after[len(prefix) :]:
        return page, False  # the page starts inside a group, which is listed as a whole
    query = [("list-type", "2"), ("encoding-type", "url"), ("max-keys", str(1 if delimiter else limit))]
    answer = wire.ask([*query, ("prefix", folder)])
    root = parse(answer.status, answer.body, wire.url, "ListBucketResult")
    below = _read_page(root, _path_order, folder, start_after, wire.url)
    if not below.entries or folder in page.prefixes or any(entry.key.startswith(folder) for entry in page.entries):
        return page, False
    last = page.next_after or (folder + HIGHEST if delimiter else below.next_after)
    if delimiter:
        return ListPage(page.entries, sorted([folder, *page.prefixes]), last), False
    if (root.findtext("{*}IsTruncated") or "").strip().lower() == "true":
        return below, True
    return ListPage(sorted([*below.entries, *page.entries]), page.prefixes, last), False


def parse(status: int, body: bytes, url: str, wanted: str) -> ElementTree.Element:
    """The XML document named `wanted` in a successful answer, else the error that the answer stands for."""
    if status != 200:
        raise errors.from_status(status, body.decode(errors="replace"), url)
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise Unavailable(f"{url}: the listing is not XML ({error}): check the endpoint") from error
    name = root.tag.rpartition("}")[2]
    if name != wanted:
        raise Unavailable(f"{url}: the answer to a listing is a {name}, not a {wanted}: check the endpoint")
    return root


def _read_page(root: ElementTree.Element, order: Order, prefix: str, start_after: str, url: str) -> ListPage:
    """An answer as a page, sorted; `next_after` is its last item ("" if it has none), whether or not more follows."""
    decode = _decode if root.findtext("{*}EncodingType") == "url" else str
    after = order(start_after)
    folded = start_after.removesuffix(HIGHEST) if start_after.endswith(HIGHEST) else ""
    entries, prefixes = [], []
    last_key = last_prefix = ""
    for item in root.iterfind("{*}Contents"):
        said = {child.tag.rpartition("}")[2]: child.text or "" for child in item}  # four times as fast as findtext
        key = decode(said.get("Key", ""))
        last_key = _risen(last_key, key, order, url)
        if order(key) > after and key.startswith(prefix):
            etag, size = said.get("ETag", "").strip('"'), int(said.get("Size") or 0)
            entries.append(ListEntry(key, size, etag, parse_time(said.get("LastModified", ""))))
    for item in root.iterfind("{*}CommonPrefixes"):
        common = decode(item.findtext("{*}Prefix") or "")
        last_prefix = _risen(last_prefix, common, order, url)
        if common != folded and common.startswith(prefix) and order(common + HIGHEST) > after:
            prefixes.append(common)
    last = last_prefix + HIGHEST if order(last_prefix) > order(last_key) else last_key
    return ListPage(sorted(entries), sorted(prefixes), last if entries or prefixes else "")


def _decode(text: str) -> str:
    """A key of `encoding-type=url`. Most have no other escape than their slashes."""
    text = text.replace("+", " ").replace("%2F", "/")
    return unquote(text) if "%" in text else text


def cut(page: ListPage, limit: int, order: Order = str) -> ListPage:
    """The first `limit` items of a page that has more."""
    items = sorted([entry.key for entry in page.entries] + page.prefixes, key=order)[:limit]
    last, kept = items[-1], set(items)
    prefixes = [common for common in page.prefixes if common in kept]
    entries = [entry for entry in page.entries if entry.key in kept]
    return ListPage(entries, prefixes, last + HIGHEST if last in prefixes else last)


def _risen(before: str, now: str, order: Order, url: str) -> str:
    if order(now) <= order(before):
        raise NotSupported(
            f"{url} lists {now!r} after {before!r}, so it keeps no order to page by (S3 Express directory buckets do "
            "not): it can be read but not listed through Forebay"
        )
    return now


def _path_order(text: str) -> str:
    """Sorts as SeaweedFS lists: name by name along the path."""
    return text.replace("/", "\0")


@functools.lru_cache(maxsize=4096)
def parse_time(text: str) -> float:
    """Unix time of an ISO 8601 time; 0 if it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
