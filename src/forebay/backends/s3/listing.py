"""Lists buckets of S3, of compatible services, and of Google's XML API.

Theory. S3 lists in the byte order of keys and can start after any key, so each page is one request and nothing is kept
between pages. The answer is not trusted: keys outside the prefix or not above the position are dropped, pages longer
than asked are cut, and an answer whose keys do not rise is refused.

SeaweedFS keeps directories and lists `a/b` before `a.txt`, as if '/' were the lowest character. Its answers name the
server, so its pages are taken in that order. Nothing is left out or repeated, but only each page by itself is in byte
order. SeaweedFS also takes a key `foo` and the folder `foo/` for one thing and continues behind both. So the keys below
the one that a page starts after are listed by an extra request.

S3 Express directory buckets have no order at all and are refused (`NotSupported`): paging would leave objects out.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from operator import lt
from xml.etree import ElementTree

from forebay.backends import errors
from forebay.backends.http.requests import Answer, Wire
from forebay.backends.pages import HIGHEST, check_limit
from forebay.backends.s3.contents import Contents, quick, slow
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
        contents = _contents(answer, wire.url)
        keeps_folders = answer.headers.get("server", "").startswith("SeaweedFS")
        order = _path_order if keeps_folders else None
        page = _read_page(contents, order, prefix, start_after, wire.url)
        if keeps_folders and sent_after and not token:
            page, is_all = _with_what_is_below(wire, page, prefix, delimiter, start_after, limit)
            if is_all:
                return page
        if len(page.entries) + len(page.prefixes) > limit:
            return cut(page, limit, order)
        is_full = len(page.entries) + len(page.prefixes) == limit
        if keeps_folders and is_full:
            return page  # what lies below its last key may follow, whatever the answer says
        if not contents.is_truncated:
            return ListPage(page.entries, page.prefixes)
        if page.next_after:  # fewer than asked is allowed
            return page
        token = contents.token
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
    contents = _contents(answer, wire.url)
    below = _read_page(contents, _path_order, folder, start_after, wire.url)
    if not below.entries or folder in page.prefixes or any(entry.key.startswith(folder) for entry in page.entries):
        return page, False
    last = page.next_after or (folder + HIGHEST if delimiter else below.next_after)
    if delimiter:
        return ListPage(page.entries, sorted([folder, *page.prefixes]), last), False
    if contents.is_truncated:
        return below, True
    return ListPage(sorted([*below.entries, *page.entries]), page.prefixes, last), False


def parse(answer: Answer, url: str, wanted: str) -> ElementTree.Element:
    """The XML document named `wanted` in a successful answer, else the error that the answer stands for."""
    if answer.status != 200:
        raise errors.from_status(answer.status, answer.body.decode(errors="replace"), url, answer.headers)
    try:
        root = ElementTree.fromstring(answer.body)
    except ElementTree.ParseError as error:
        raise Unavailable(f"{url}: the listing is not XML ({error}): check the endpoint") from error
    name = root.tag.rpartition("}")[2]
    if name != wanted:
        raise Unavailable(f"{url}: the answer to a listing is a {name}, not a {wanted}: check the endpoint")
    return root


def _contents(answer: Answer, url: str) -> Contents:
    found = quick(answer.body) if answer.status == 200 else None
    return found or slow(parse(answer, url, "ListBucketResult"))


def _read_page(said: Contents, order: Order | None, prefix: str, start_after: str, url: str) -> ListPage:
    """An answer as a page, sorted; `next_after` is its last item ("" if it has none), whether or not more follows."""
    last_key = _check_order(said.keys, order, url)
    last_prefix = _check_order(said.prefixes, order, url)
    ranked = order or str
    after = ranked(start_after)
    entries = list(map(ListEntry, said.keys, said.sizes, said.etags, said.modified_s))
    # between two keys under the prefix, in any order by characters, there are only keys under the prefix
    if entries and not (ranked(said.keys[0]) > after and all(said.keys[at].startswith(prefix) for at in (0, -1))):
        entries = [entry for entry in entries if ranked(entry.key) > after and entry.key.startswith(prefix)]
    folded = start_after.removesuffix(HIGHEST) if start_after.endswith(HIGHEST) else ""
    prefixes = [
        common
        for common in said.prefixes
        if common != folded and common.startswith(prefix) and ranked(common + HIGHEST) > after
    ]
    last = last_prefix + HIGHEST if ranked(last_prefix) > ranked(last_key) else last_key
    if order is not None:
        entries.sort()
        prefixes.sort()
    return ListPage(entries, prefixes, last if entries or prefixes else "")


def cut(page: ListPage, limit: int, order: Order | None = None) -> ListPage:
    """The first `limit` items of a page that has more."""
    items = sorted([entry.key for entry in page.entries] + page.prefixes, key=order)[:limit]
    last, kept = items[-1], set(items)
    prefixes = [common for common in page.prefixes if common in kept]
    entries = [entry for entry in page.entries if entry.key in kept]
    return ListPage(entries, prefixes, last + HIGHEST if last in prefixes else last)


def _check_order(keys: list[str], order: Order | None, url: str) -> str:
    """The last of `keys` ("" if there are none), which rise; else `NotSupported`."""
    ranks = keys if order is None else list(map(order, keys))
    if not all(map(lt, ranks, ranks[1:])) or ranks[:1] == [""]:
        before, now = next(((a, b) for a, b in pairwise(["", *keys]) if (order or str)(b) <= (order or str)(a)))
        raise NotSupported(
            f"{url} lists {now!r} after {before!r}, so it keeps no order to page by (S3 Express directory buckets do "
            "not): it can be read but not listed through Forebay"
        )
    return keys[-1] if keys else ""


def _path_order(text: str) -> str:
    """Sorts as SeaweedFS lists: name by name along the path."""
    return text.replace("/", "\0")
