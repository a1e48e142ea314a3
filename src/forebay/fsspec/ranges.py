"""Reads many ranges: cuts them into requests, and converts the answers into fsspec's form.

Theory. A batch is one round trip. Its answer is in memory twice, as received and as the `bytes` that fsspec promises.
So one request asks for at most BATCH_BYTES. A range outside of the object is empty, as for every file in Python, and no
error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from forebay.core import limits
from forebay.core.errors import ForebayError
from forebay.core.messages.batch import Item
from forebay.fsspec.errors import as_os_error

BATCH_ITEMS = 2048
BATCH_BYTES = 256 * limits.MIB


def listed(numbers: Any, count: int) -> list[int | None]:
    """`starts` or `ends` as a list: they may be one number for all."""
    return list(numbers) if isinstance(numbers, Iterable) else [numbers] * count


def shares(items: Sequence[Item]) -> Iterable[Sequence[Item]]:
    """The items of each request, in order."""
    first = size_bytes = 0
    for at, item in enumerate(items):
        wanted = 0 if item.end is None else max(0, item.end - item.start)
        if at > first and (at - first >= BATCH_ITEMS or size_bytes + wanted > BATCH_BYTES):
            yield items[first:at]
            first, size_bytes = at, 0
        size_bytes += wanted
    if first < len(items):
        yield items[first:]


def bytes_or_error(path: str, result: Any) -> bytes | OSError:
    """A result of `get_many` as fsspec has it."""
    if isinstance(result, bytes):
        return result
    if not isinstance(result, ForebayError):
        return bytes(result)
    return b"" if result.code == "InvalidRange" else as_os_error(result, path)


def told_all(paths: Sequence[str], results: Sequence[Any], on_error: str) -> list[Any]:
    """All results, with errors in their places, or the first of them raised."""
    found = [bytes_or_error(path, result) for path, result in zip(paths, results, strict=True)]
    if on_error == "raise":
        for result in found:
            if isinstance(result, OSError):
                raise result
    return found
