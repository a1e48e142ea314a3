"""Reading many items: which requests are made of them, and what becomes of an answer that is cut.

Theory. A list of items becomes one request where it fits, in items and in bytes; what the node has no room for in one
answer (`BatchFull`) is asked for in the next. Results are put where their items stood.

The one retry. When a connection ends in the middle of an answer, the items whose frames had not arrived whole are asked
for once more, on another connection: a node's front that was restarted, or a fetch that failed midway, then costs a
round trip instead of a training run. An item is always read whole by one request, so no result mixes two versions; the
versions of different items were never tied together, and `etag` is judged again. A second cut is the items' error.
Nothing else is repeated here: what an item's frame says stands.

Invariants. (1) As many results as items, in their order. (2) An item is asked for at most twice after it was begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from forebay.client.connection import CUT, Place
from forebay.client.flows import Flow, raised
from forebay.client.http1 import Request, Response
from forebay.client.many import FrameSink, Host, Many, Result, least_bytes
from forebay.core import batch, limits
from forebay.core.batch import Item, Wanted
from forebay.core.errors import Corrupt, ForebayError, Invalid, Unavailable
from forebay.ports import clock

OnError = Literal["raise", "report"]
TARGET = "/-/v1/batch"
_HEADERS = (("Content-Type", batch.ASK_MEDIA),)


def get_many(
    items: Sequence[Wanted],
    here: Place,
    *,
    host: Host | None = None,
    on_error: OnError = "raise",
    into: bytearray | memoryview | None = None,
) -> Flow[Many]:
    """The results of `items`; what `host` has of them is not asked for. See `Client.get_many`."""
    if on_error not in ("raise", "report"):
        raise Invalid(f"on_error is {on_error!r}: say 'raise' or 'report'")
    memory = None if into is None else memoryview(into).cast("B")
    if memory is not None and memory.readonly:
        raise Invalid("the buffer is read-only: pass a bytearray, or a view of one")
    started_s = clock.monotonic_s()
    found: Sequence[Result | None] = ()
    missing = items
    if host is not None and items:
        found = host([item if isinstance(item, Item) else _item(item) for item in items])
        missing = [item for item, result in zip(items, found, strict=True) if result is None]
    results: list[Result] = []
    cold = 0
    for _, share in shares(missing, here):
        answered, colds = yield from _ask(share, memory if not results else None)
        results = answered if not results else results + answered
        cold += colds
    if len(missing) < len(items):
        rest = iter(results)
        results = [next(rest) if result is None else result for result in found]
    many = Many(results, cold, clock.monotonic_s() - started_s)
    if on_error == "raise":
        _raise_first(items, results)
    return many


def shares(items: Sequence[Wanted], here: Place) -> Iterator[tuple[Place, Sequence[Wanted]]]:
    """Who is asked for what, in order. All that knows which node owns an item: a node alone owns everything."""
    for start in range(0, len(items), limits.BATCH_ITEMS_MAX):
        yield here, items[start : start + limits.BATCH_ITEMS_MAX] if len(items) > limits.BATCH_ITEMS_MAX else items


def _ask(items: Sequence[Wanted], memory: memoryview | None) -> Flow[tuple[list[Result], int]]:
    """Results for at most BATCH_ITEMS_MAX items, and how many were cold."""
    body = _encoded(items)
    if len(body) > limits.BATCH_BODY_BYTES_MAX:
        middle = len(items) // 2
        first, cold = yield from _ask(items[:middle], memory)
        second, more = yield from _ask(items[middle:], None)
        return first + second, cold + more
    results, cold = yield from _ask_once(items, body, memory)
    if len(results) < len(items):
        left = items[len(results) :]
        try:
            more_results, more = yield from _ask_once(left, _encoded(left), None, last=True)
        except Unavailable as error:
            more_results, more = [error] * len(left), 0
        results += more_results
        cold += more
    return (yield from _ask_for_full(items, results, cold))


def _item(fields: tuple[Any, ...]) -> Item:
    try:
        return Item(*fields)
    except TypeError as error:
        raise _no_item(error) from None


def _no_item(error: Exception) -> Invalid:
    return Invalid(f"an item is none ({error}): give Item, or a tuple (bucket, key, start, end)")


def _encoded(items: Sequence[Wanted]) -> bytes:
    try:
        return batch.encode_items(items)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise _no_item(error) from None


def _ask_once(
    items: Sequence[Wanted], body: bytes, memory: memoryview | None, *, last: bool = False
) -> Flow[tuple[list[Result], int]]:
    """Results for the first of `items`: for all, unless the connection was cut."""
    sink = FrameSink(memory, least_bytes(items))
    try:
        response: Response = yield Request("POST", TARGET, _HEADERS, body, sink=sink, repeatable=True)
    except Unavailable as error:
        if error.code != CUT:
            raise
        results = sink.received()[: len(items)]
        if last:
            results += [error] * (len(items) - len(results))
        return results, sink.cold
    if not response.ok:
        raise raised(response, "the batch")
    results = sink.received()
    if len(results) != len(items) or sink.left_over():
        raise Corrupt(
            f"the answer to a batch of {len(items)} items holds {len(results)}: check that client and node are of one "
            "version"
        )
    return results, sink.cold


def _ask_for_full(items: Sequence[Wanted], results: list[Result], cold: int) -> Flow[tuple[list[Result], int]]:
    """Ask again for what an answer had no room for. Each answer has room for one item at least, or never will."""
    full = [at for at, result in enumerate(results) if isinstance(result, ForebayError) and result.code == batch.FULL]
    if not full or len(full) == len(results):
        return results, cold
    answered, more = yield from _ask([items[at] for at in full], None)
    for at, result in zip(full, answered, strict=True):
        results[at] = result
    return results, cold + more


def _raise_first(items: Sequence[Wanted], results: list[Result]) -> None:
    for at, result in enumerate(results):
        if isinstance(result, ForebayError):
            item = items[at]
            bucket, key = (item.bucket, item.key) if isinstance(item, Item) else item[:2]
            raise type(result)(
                f"item {at} of the batch, {bucket}/{key}: {result.message}",
                code=result.code,
                retry_after_s=result.retry_after_s,
                size_bytes=result.size_bytes,
            ) from result
