"""Suggests the name that was probably meant: `did_you_mean` for messages, `known_arguments` for keyword arguments.

Theory. An unknown name is nearly always a misspelling of a known one. difflib's ratio finds it, and one suggestion is
enough. Python itself suggests keyword arguments from 3.13 on.

Invariants. (1) A suggestion is a known name. (2) A call with known arguments is passed on unchanged.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" if one of `known` is much like `name`, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def known_arguments(function: F) -> F:
    """`function`, whose `TypeError` for a keyword argument that it does not have names the one that was meant."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                what = type(args[0]).__name__ if function.__name__ == "__init__" else function.__qualname__
                raise TypeError(f"{what} has no argument {name!r}{did_you_mean(name, known)}")
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
