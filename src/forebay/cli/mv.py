"""`forebay mv`: as `cp`, and each source goes once its copy is there whole.

Theory. A move is a copy and a delete, so it can stop between the two and leave both; the same command again does the
rest. An object goes only if it is still the one that was copied: one that was written meanwhile stays.

Invariant. A source is deleted only after its copy was acknowledged.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from forebay.cli import address
from forebay.cli.cp import copy
from forebay.cli.jobs import Quiet
from forebay.cli.options import AsJson, Debug, Url, open_client
from forebay.cli.outcome import verb

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("mv")
@verb
def mv(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="s3://bucket/key, or a local path.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="s3://bucket/key, or a local path.")],
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="All in the folder or directory.")] = False,
    threads: Annotated[int, typer.Option("--threads", "-j", min=1, max=64, help="With -r, objects at once.")] = 8,
    quiet: Quiet = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Move objects to files, files to objects, or objects to objects.

    Each source goes when its copy is whole. With --json as `cp`.
    """
    with open_client(url) as client:

        def drop(at: address.Address, etag: str) -> None:
            client.delete(at.bucket, at.key, etag=etag)

        done = copy(
            client,
            source,
            target,
            recursive=recursive,
            threads=threads,
            force=False,
            checksum=False,
            quiet=quiet or as_json,
            moved=drop,
            sent=os.unlink,
        )
    done.tell(source, as_json=as_json)
