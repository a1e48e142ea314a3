"""How much of the node's code stories enter: lines of functions that were called, of all lines of functions.

Theory. A function counts with its lines as soon as it is entered, which costs one look at each call of a function and
not at each line. What is nested in a function counts by itself.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import forebay.node

ROOMS = ("engine", "store")


class Entered:
    """Looks from now on, for good."""

    def __init__(self) -> None:
        self._root = str(Path(forebay.node.__file__ or "").parent)
        self._codes: set[CodeType] = set()
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._codes.add(frame.f_code)

    def told(self) -> str:
        """A line for each room, and the longest functions that were never entered."""
        sys.setprofile(None)
        entered = {(code.co_filename, code.co_firstlineno) for code in self._codes}
        told, missed = [], []
        for room in ROOMS:
            total = met = 0
            for path in sorted(Path(self._root, room).rglob("*.py")):
                for name, first, lines in _functions(path):
                    total += lines
                    if (str(path), first) in entered:
                        met += lines
                    else:
                        missed.append((lines, f"{path.relative_to(self._root)}:{first} {name}"))
            told.append(f"node/{room}: {met} of {total} lines of functions entered, {100 * met / total:.0f} %")
        return "\n".join([*told, *(f"  never: {lines:>3} {what}" for lines, what in sorted(missed)[-20:])])


def _functions(path: Path) -> list[tuple[str, int, int]]:
    """Name, first line as code objects tell it, and lines of each function, without those nested in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            inner = [each for each in ast.walk(node) if isinstance(each, type(node)) and each is not node]
            nested = sum((each.end_lineno or 0) - each.lineno + 1 for each in inner)
            found.append((node.name, first, (node.end_lineno or first) - node.lineno + 1 - nested))
    return found
