"""`forebay mv`: as `cp`, and each source goes once its copy is there whole.

Theory. A move is a copy and a delete, so it can stop between the two and leave both; the same command again does the
rest. Nothing is left out because it seems to be there already, as `cp -r` does by size and time: that would delete what
was not copied. A source goes only if it is still the one that was copied: what was written meanwhile stays.

Two buckets may be one place at the backend (the same URL, one within the other, the directory that a local path is in).
A move between them would copy each object onto itself and delete it, so it is refused.

Invariant. A source is deleted only after a copy of it elsewhere was acknowledged.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import unquote

import typer

from forebay.cli import address
from forebay.cli.cp import SCHEMES, copy
from forebay.cli.jobs import Quiet
from forebay.cli.options import AsJson, Debug, Recursive, Source, Target, Threads, Url, open_client
from forebay.cli.outcome import verb
from forebay.core.errors import Invalid, Precondition
from forebay.core.types import LOCAL_URL

if TYPE_CHECKING:
    from forebay.client.sync import Client

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("mv")
@verb
def mv(
    source: Source,
    target: Target,
    recursive: Recursive = False,
    threads: Threads = 8,
    quiet: Quiet = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Move objects to files, files to objects, or objects to objects.

    Each source goes when its copy is whole. With --json as `cp`.
    """
    with open_client(url) as client:
        _check_apart(client, source, target)

        def drop(at: address.Address, etag: str) -> None:
            client.delete(at.bucket, at.key, etag=etag)

        def unlink(path: str, modified_s: float) -> None:
            if os.stat(path).st_mtime != modified_s:
                raise Precondition(f"{path} was written meanwhile, and stays: move it again")
            os.unlink(path)

        done = copy(
            client,
            source,
            target,
            recursive=recursive,
            threads=threads,
            force=True,
            checksum=False,
            quiet=quiet or as_json,
            moved=drop,
            sent=unlink,
        )
    done.tell(source, as_json=as_json)


def _check_apart(client: Client, source: str, target: str) -> None:
    """`Invalid` if both sides may be the same bytes under two names."""
    if source == "-":
        raise Invalid("standard input cannot be moved: `forebay put - BUCKET/KEY` stores it")
    if not source.startswith(SCHEMES) and not target.startswith(SCHEMES):
        return  # `copy` refuses two local paths
    if source.startswith(SCHEMES) and target.startswith(SCHEMES):
        one, other = address.parse(source).bucket, address.parse(target).bucket
        if one == other:
            return  # then names tell
    places = [_place(client, side) for side in (source, target)]
    one_place, other_place = places
    if "" not in places and (one_place.startswith(other_place) or other_place.startswith(one_place)):
        raise Invalid(f"{source} and {target} are in one place at the backend: move within one of the two buckets")


def _place(client: Client, side: str) -> str:
    """Where the objects of one side are: the backend's URL with its endpoint, or file:// and the real directory, with a
    final slash; "" for a bucket without a backend, which is nowhere else."""
    if not side.startswith(SCHEMES):
        real = os.path.realpath(side)
        return f"file://{real if os.path.isdir(real) else os.path.dirname(real)}/"
    name = address.parse(side).bucket
    url = next((bucket.url for bucket in client.buckets() if bucket.name == name), f"s3://{name}")
    if url == LOCAL_URL:
        return ""
    if url.startswith("file://"):
        return f"file://{os.path.realpath(unquote(url.removeprefix('file://')))}/"
    return f"{url.rstrip('/')}/"
