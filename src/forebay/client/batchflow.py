"""Reads many items: cuts them into requests, and retries what a broken answer left open.

Theory. Items become one request where they fit, by number and by bytes. What the node had no room for in one answer
(`BatchFull`) goes into the next request. Results stand in the order of the items.

Retry. When a connection ends in the middle of an answer, the items whose frames had not arrived are requested once
more, on another connection. So a front that was restarted, or a fetch that failed midway, costs a round trip instead of
a training run. One request always reads an item whole, so no result mixes two versions. Versions of different items
were never tied together, and `etag` is judged again. A second cut is the items' error. A connection that ended before
any answer (it stood in the queue of a front that died) is also followed by one more. Nothing else is repeated: the
error in an item's frame stands.

Invariants. (1) There are as many results as items, in their order. (2) At most two requests for an item were answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from forebay.client.connection import CUT, CutOff
from forebay.client.flows import Flow, raised
from forebay.client.many import FrameSink, Host, Many, Result
from forebay.core import limits
from forebay.core.errors import Corrupt, ForebayError, Invalid, Unavailable
from forebay.core.messages import batch
from forebay.core.messages.batch import Item, Wanted
from forebay.core.messages.http1 import Endpoint, Request, Response
from forebay.ports import clock

OnError = Literal["raise", "report"]
TARGET = "/-/v1/batch"
_HEADERS = (("Content-Type", batch.ASK_MEDIA),)


def get_many(
    items: Sequence[Wanted],
    here: Endpoint,
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


def shares(items: Sequence[Wanted], here: Endpoint) -> Iterator[tuple[Endpoint, Sequence[Wanted]]]:
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
    results, cold = yield from _answered(items, body, memory)
    return (yield from _ask_for_full(items, results, cold))


def _answered(items: Sequence[Wanted], body: bytes, memory: memoryview | None) -> Flow[tuple[list[Result], int]]:
    """What the node says of `items`, which `body` asks for. See the module's header for what is asked once more."""
    results: list[Result] = []
    cold = cuts = unanswered = 0
    while True:
        cut: Unavailable | None = None
        sink = FrameSink(memory, items[len(results) :] if results else items)
        try:
            yield from _ask_once(body, sink)
        except Unavailable as error:
            if error.code != CUT and not cuts:
                raise
            cut = error.plain if isinstance(error, CutOff) else error
        answered = sink.received()
        results = results + answered if results else answered
        cold += sink.cold
        if cut is None or len(results) == len(items):
            break
        cuts += sink.begun
        unanswered += not sink.begun
        if cut.code != CUT or cuts > 1 or unanswered > 1:
            if not cuts:
                raise cut
            results += [cut] * (len(items) - len(results))
            break
        memory, body = None, _encoded(items[len(results) :])
    if len(results) != len(items) or (cut is None and sink.left_over()):
        raise Corrupt(
            f"the answer to a batch of {len(items)} items holds {len(results)}: check that client and node are of one "
            "version"
        )
    return results, cold


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


def _ask_once(body: bytes, sink: FrameSink) -> Flow[None]:
    """One request, one answer into `sink`."""
    response: Response = yield Request("POST", TARGET, _HEADERS, body, sink=sink, repeatable=True)
    if not response.ok:
        raise raised(response, "the batch")


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
