"""Cuts a range of keys into pieces when only a few of its keys are known.

Theory. A listing goes page by page, so a faster one must begin in several places at once without knowing where the keys
are. There are any number of strings between two keys, but real keys use few characters. So a string is read as a number
whose digits are the characters seen so far (`alphabet`), behind the common beginning of low and high, and the range is
cut at equal distances. A cut where nothing is costs one small request and shrinks the range; a few rounds find the
keys.

Some servers list `a/b` before `a-b`, as if '/' were the lowest character. Behind the common beginning a cut therefore
uses only characters above '/'. A key *passes* a cut only if it is above it in both orders: then no server has anything
left to list below the cut.

Invariants. (1) Every cut lies strictly between low and high, and cuts rise strictly. (2) `is_past` never holds for a
key that a server of either order lists before the end.
"""

from __future__ import annotations

from collections.abc import Iterable

DIGITS = 6  # looked at behind what low and high have in common


class Alphabet:
    """The characters that keys have, as digits. Only those above '/' are used."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._digits: dict[str, int] = {}
        self._characters: list[str] = []

    def learn(self, keys: Iterable[str]) -> None:
        """Characters of these keys, for the cuts to come."""
        new = {character for key in keys for character in key if character > "/"} - self._seen
        if new:
            self._seen |= new
            self._characters = sorted(self._seen)
            self._digits = {character: at for at, character in enumerate(self._characters, 1)}

    def number(self, text: str) -> int:
        """The first DIGITS characters as a number; what ends early, or has a character unseen, counts as low."""
        value = 0
        for at in range(DIGITS):
            value = value * self._base + (self._digits.get(text[at], 0) if at < len(text) else 0)
        return value

    @property
    def _base(self) -> int:
        return len(self._characters) + 1

    @property
    def top(self) -> int:
        """Above every number."""
        return int(self._base**DIGITS)

    def text(self, number: int) -> str:
        """The shortest text with this number; it ends at the first digit that stands for no character."""
        digits = []
        for _ in range(DIGITS):
            number, digit = divmod(number, self._base)
            digits.append(digit)
        text = ""
        for digit in reversed(digits):
            if not digit:
                break
            text += self._characters[digit - 1]
        return text


def common_prefix(low: str, high: str) -> str:
    """What both begin with."""
    for at, (a, b) in enumerate(zip(low, high, strict=False)):
        if a != b:
            return low[:at]
    return low[: len(high)]


def cuts(low: str, high: str | None, prefix: str, parts: int, alphabet: Alphabet) -> list[str]:
    """Up to `parts` - 1 strings that cut the keys under `prefix` in (low, high) into ranges of equal width; for `high`
    None up to the last key there can be. Fewer, or none, when there is no room for more."""
    low = max(low, prefix)
    shared = prefix if high is None else common_prefix(low, high)
    if not shared.startswith(prefix):
        return []
    to = alphabet.top if high is None else alphabet.number(high[len(shared) :])
    while True:
        from_ = alphabet.number(low[len(shared) :])
        places = (shared + alphabet.text(from_ + (to - from_) * part // parts) for part in range(1, parts))
        found = sorted({place for place in places if low < place and (high is None or place < high)})
        if found or len(shared) >= len(low):
            return found
        shared, to = low[: len(shared) + 1], alphabet.top  # what differs there is no digit: look behind it


def share_left(first: str, at: str, end: str | None, prefix: str, alphabet: Alphabet) -> float:
    """How much of the keys from `first` to `end` is left behind `at`, as a share of what is done: 3.0 when a quarter
    is done; 1.0 when nothing can be said."""
    shared = prefix if end is None else common_prefix(at, end)
    low = alphabet.number(first[len(shared) :]) if first.startswith(shared) else 0
    now = alphabet.number(at[len(shared) :])
    high = alphabet.top if end is None else alphabet.number(end[len(shared) :])
    return (high - now) / max(1, now - low) if high > now else 1.0


def is_past(key: str, end: str) -> bool:
    """Whether a listing that shows `key` has shown everything up to `end`, whichever order the server keeps."""
    return key > end and key.replace("/", "\0") > end.replace("/", "\0")
