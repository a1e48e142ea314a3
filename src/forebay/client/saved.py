"""Nodes that have a name here: where each is, what vouches for it, and the token for it.

Theory. Whoever uses more than one node names them once (`forebay config set prod https://…`) and says `--url prod`, or
`forebay config use prod` and nothing. They are kept in one file of the user's, as JSON. A name has none of the
characters that every URL has, so reading the file is left out where a URL is given.

Invariants. (1) A saved token goes to the saved URL alone. (2) The file is its user's alone, and replaced whole.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from forebay.core.errors import Invalid

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}").fullmatch


class Saved(msgspec.Struct, frozen=True, omit_defaults=True):
    """One node. `ca` and `token` are empty where there is none."""

    url: str
    ca: str = ""
    token: str = ""


class Book(msgspec.Struct, omit_defaults=True):
    """All of them by name, and which is used where none is named."""

    nodes: dict[str, Saved] = {}
    use: str = ""


def path() -> Path:
    """The user's file."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "forebay" / "nodes.json"


def read() -> Book:
    """What is saved; `Invalid` for a file that is none of ours."""
    try:
        return msgspec.json.decode(path().read_bytes(), type=Book)
    except (OSError, RuntimeError):  # not there, not ours, or nobody has a home
        return Book()
    except msgspec.MsgspecError as error:
        raise Invalid(f"{path()} cannot be read ({error}): mend it, or delete it") from None


def write(book: Book) -> None:
    """Replace what is saved."""
    path().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path().with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(book), indent=2))
    os.replace(new, path())


def find(url: str) -> Saved | None:
    """The node that `url` names, or that is used where it is empty; None for a URL, and where nothing is saved."""
    if url and not NAME(url):
        return None
    book = read()
    return book.nodes.get(url or book.use)
