"""`forebay cat`: an object's bytes to standard output."""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated

import typer

from forebay.cli import address
from forebay.cli.options import Address, Debug, Url, open_client
from forebay.cli.outcome import verb
from forebay.client import flows
from forebay.client.sinks import IntoFd
from forebay.core.errors import Invalid
from forebay.core.types import RangeSpec

app = typer.Typer(rich_markup_mode=None, add_completion=False)


Member = Annotated[
    str | None, typer.Option("--member", metavar="NAME", help="One file in the shard (tar, zip), by its name there.")
]


def parse_range(text: str) -> RangeSpec:
    """`FIRST-LAST` inclusive, `FIRST-` to the end, `-N` the last N bytes; else `Invalid`."""
    match = re.fullmatch(r"([0-9]{0,18})-([0-9]{0,18})", text.removeprefix("bytes="))
    if not match or not (match[1] or match[2]):
        raise Invalid(f"--range {text!r} is not known: use FIRST-LAST (inclusive), FIRST- or -N for the last N bytes")
    first = int(match[1]) if match[1] else None
    last = int(match[2]) if match[2] else None
    if first is not None and last is not None and last < first:
        raise Invalid(f"--range {text!r} ends before it starts: use FIRST-LAST with LAST not below FIRST")
    return RangeSpec(first, last)


@app.command("cat")
@verb
def cat(
    where: Address,
    range: Annotated[
        str | None, typer.Option("--range", metavar="RANGE", help="FIRST-LAST (inclusive), FIRST- or -N.")
    ] = None,
    member: Member = None,
    url: Url = None,
    debug: Debug = False,
) -> None:
    """Write an object, or a range of it, to standard output."""
    at = address.parse_object(where)
    span = None if range is None else parse_range(range)
    sys.stdout.flush()
    with open_client(url) as client:
        client.run(flows.get(at.bucket, at.key, sink=IntoFd(stdout_fd()), range=span, member=member))


def stdout_fd() -> int:
    """The descriptor of standard output, made blocking: some shells hand over one that is not."""
    fd = sys.stdout.fileno()
    os.set_blocking(fd, True)
    return fd
