"""`forebay logs`: what the node of a directory wrote to its log."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from forebay.cli.options import Debug, Dir
from forebay.cli.outcome import verb
from forebay.client import local_node
from forebay.core.errors import NotFound

app = typer.Typer(rich_markup_mode=None, add_completion=False)
LOOK_S = 0.25


@app.command("logs")
@verb
def logs(
    lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", min=0, help="The last N lines.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, until Ctrl-C.")] = False,
    dir: Dir = None,
    debug: Debug = False,
) -> None:
    """Print the log of the node on this machine."""
    path = local_node.directory(dir) / "log" / "node.log"
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise NotFound(
            f"there is no {path}: a node that `forebay up` started logs there; one in the foreground logs to its "
            "standard error (for a service: `journalctl`)"
        ) from None
    with file, suppress(KeyboardInterrupt):
        _print(b"".join(deque(file, maxlen=lines)))
        if follow:
            _follow(path, file)


def _follow(path: Path, file: BinaryIO) -> None:
    while True:
        _print(file.read())
        with suppress(OSError):
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):  # it was rotated
                _print(file.read())
                with path.open("rb") as newer:
                    _follow(path, newer)
        time.sleep(LOOK_S)


def _print(data: bytes) -> None:
    sys.stdout.write(data.decode(errors="replace"))
    sys.stdout.flush()
