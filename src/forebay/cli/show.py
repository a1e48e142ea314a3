"""Prints JSON for programs and aligned columns for people.

Theory. `--json` prints one document, or one line for each thing where there may be many (`ls`). Its fields are those of
`core/messages/calls.py` or are listed in docs/cli.md, and they stay. People get plain aligned columns without boxes,
which suit `cut`, `sort` and narrow terminals. Importing rich (80 ms) is left to the verbs that draw.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from forebay.cli.outcome import one_line
from forebay.core.quantity import counted as counted
from forebay.core.quantity import duration as duration
from forebay.core.quantity import rate as rate
from forebay.core.quantity import size as size
from forebay.core.types import FRESH_IMMUTABLE


def document(value: Any) -> None:
    """One JSON document."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def line(value: Any) -> None:
    """One line of JSON Lines."""
    print(msgspec.json.encode(value).decode())


def moment(unix_s: float) -> str:
    """Local time to the second, as `aws s3 ls` shows it; `-` for none."""
    if unix_s <= 0:
        return "-"
    try:
        return datetime.fromtimestamp(unix_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "for ever" if unix_s >= FRESH_IMMUTABLE / 2 else "-"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def columns(head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Aligned columns under a head; the columns numbered in `right` are right-aligned."""
    cells = [list(head), *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(head))]
    to_right = set(right)
    lines = (
        "  ".join(cell.rjust(width) if at in to_right else cell.ljust(width) for at, (cell, width) in _at(row, widths))
        for row in cells
    )
    return "\n".join(text.rstrip() for text in lines)


def _at(row: Sequence[str], widths: Sequence[int]) -> Iterable[tuple[int, tuple[str, int]]]:
    return enumerate(zip(row, widths, strict=True))


def fields(pairs: Iterable[tuple[str, str]], indent: str = "  ") -> str:
    """`name   value` lines with the values aligned."""
    found = list(pairs)
    width = max((len(name) for name, _ in found), default=0)
    return "\n".join(f"{indent}{name.ljust(width)}  {one_line(value)}".rstrip() for name, value in found)


def note(text: str) -> None:
    """Something a person should know that is not the output: to standard error."""
    print(text, file=sys.stderr, flush=True)
