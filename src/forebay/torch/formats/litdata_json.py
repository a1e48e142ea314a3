"""Lists and dictionaries that litdata keeps as one value (`json` among the encodings): see `litdata_chunks.py`.

Theory. Older litdata wrote JSON. Newer litdata writes a letter that tells what follows: JSON with its size before it;
one text, whole number, number, truth, or nothing; a list of one of these, with its length; a dictionary, with each key
before its value; or records, which are dictionaries that have the same keys, said once. Sizes and lengths have 4 bytes.
Text has its size before it.

Invariant. A length is never taken for true before there are as many bytes: memory is bounded by what is here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from forebay.torch.decoders import json_value

_LETTERS_END = 0x20  # JSON as text begins with a later letter
_JSON, _TEXTS, _WHOLES, _NUMBERS, _TRUTHS, _DICTIONARY, _RECORDS, _TEXT, _WHOLE, _NUMBER, _TRUTH, _NOTHING = range(12)
_IN_RECORDS = 0x10  # the letters of the values of records begin here, in another order
_DEPTH_MAX = 200  # of dictionaries in dictionaries; JSON has a bound of its own


def value_of(data: Any) -> Any:
    """The value that is encoded as these bytes; raises `ValueError` for what is none."""
    data = bytes(data)
    if data and data[0] > _LETTERS_END:
        return json_value(data)
    reading = _Reading(data)
    found = reading.value(0)
    if reading.at != len(data):
        raise ValueError(f"{len(data) - reading.at} bytes follow the value")
    return found


class _Reading:
    """Where one is in these bytes."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def value(self, depth: int) -> Any:
        kind = self._number("<B")
        if kind == _JSON:
            return json_value(self._bytes(self._number("<I")))
        if kind == _TEXTS:
            return [self._text() for _ in range(self._length(4))]
        if kind in (_WHOLES, _NUMBERS):
            return np.frombuffer(self._bytes(8 * self._length(8)), "<i8" if kind == _WHOLES else "<f8").tolist()
        if kind == _TRUTHS:
            return [each != 0 for each in self._bytes(self._length(1))]
        if kind == _DICTIONARY:
            if depth > _DEPTH_MAX:
                raise ValueError(f"there are more than {_DEPTH_MAX} dictionaries in each other")
            return {self._text(): self.value(depth + 1) for _ in range(self._length(5))}
        if kind == _RECORDS:
            return self._records()
        return self._scalar(kind - _TEXT)

    def _records(self) -> list[dict[str, Any]]:
        count = self._length(0)
        keys = [self._text() for _ in range(self._length(4))]
        if count * max(1, len(keys)) > len(self._data) - self.at:
            raise ValueError(f"it says that {count} records follow, and there is not room for them")
        order = (_NOTHING, _TEXT, _WHOLE, _NUMBER, _TRUTH)
        found = []
        for _ in range(count):
            record = {}
            for key in keys:
                letter = self._number("<B") - _IN_RECORDS
                if not 0 <= letter < len(order):
                    raise ValueError(f"{letter + _IN_RECORDS} is no kind of value in a record")
                record[key] = self._scalar(order[letter] - _TEXT)
            found.append(record)
        return found

    def _scalar(self, kind: int) -> Any:
        readers: tuple[Callable[[], Any], ...] = (
            self._text,
            lambda: self._number("<q"),
            lambda: self._number("<d"),
            lambda: self._number("<B") != 0,
            lambda: None,
        )
        if not 0 <= kind < len(readers):
            raise ValueError(f"{kind + _TEXT} is no kind of value")
        return readers[kind]()

    def _text(self) -> str:
        return str(self._bytes(self._number("<I")), "utf-8")

    def _length(self, each_bytes: int) -> int:
        """How many things of at least `each_bytes` follow."""
        count: int = self._number("<I")
        if count * each_bytes > len(self._data) - self.at:
            raise ValueError(f"it says that {count} values follow, and there is not room for them")
        return count

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise ValueError("it is cut short")
        self.at += count
        return self._data[self.at - count : self.at]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]
