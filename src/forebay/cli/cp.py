"""`forebay cp`: copies files to objects, objects to files, or objects inside the node.

Theory. The arguments give the direction: `s3://` begins an object, anything else is a local path, and `-` is standard
input or output. `get` and `put` do the work, so there is one way for each. A copy inside the node moves no bytes
through this process. `-r` leaves out what the target has already and deletes nothing.

Invariant. Two local paths are refused: the shell's `cp` copies those.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli import address
from forebay.cli.get import entries, entries_crew, get_all, get_one
from forebay.cli.jobs import Quiet
from forebay.cli.many import Crew, Done
from forebay.cli.options import AsJson, Debug, Recursive, Source, Target, Threads, Url, open_client
from forebay.cli.outcome import one_line, verb
from forebay.cli.progress import Progress
from forebay.cli.put import Checksum, put_all, put_one
from forebay.core.errors import Invalid
from forebay.core.quantity import counted
from forebay.core.types import ListEntry, check_key

if TYPE_CHECKING:
    from forebay.client.sync import Client

app = typer.Typer(rich_markup_mode=None, add_completion=False)
SCHEMES = ("s3://", "forebay://")


@app.command("cp")
@verb
def cp(
    source: Source,
    target: Target,
    recursive: Recursive = False,
    threads: Threads = 8,
    force: Annotated[bool, typer.Option("--force", help="With -r, also copy what is there already.")] = False,
    checksum: Checksum = False,
    quiet: Quiet = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Copy objects to files, files to objects, or objects to objects.

    With -r, what is there already is left out, so the same command again does the rest. With --json:
    {"files", "size_bytes", "fetched_bytes" or "sent_bytes" or "copied_bytes", "skipped", "failed", "seconds",
    "target"}.
    """
    with open_client(url) as client:
        done = copy(
            client, source, target, recursive=recursive, threads=threads, force=force, checksum=checksum,
            quiet=quiet or as_json,
        )  # fmt: skip
    done.tell(source, as_json=as_json)


def copy(
    client: Client,
    source: str,
    target: str,
    *,
    recursive: bool,
    threads: int,
    force: bool,
    checksum: bool,
    quiet: bool,
    moved: Callable[[address.Address, str], None] | None = None,
    sent: Callable[[str, float], None] | None = None,
) -> Done:
    """Copy as `forebay cp` does; `moved` hears of each object, with its ETag, and `sent` of
    each file, with its time as it was read, whose copy is there whole."""
    up, down = target.startswith(SCHEMES), source.startswith(SCHEMES)
    if not up and not down:
        raise Invalid("neither side is an object: write s3://BUCKET/KEY for what is in the node")
    recursive = recursive or (down and "*" in source)

    def then(entry: ListEntry) -> None:
        if moved is not None:
            moved(address.Address(address.parse(source).bucket, entry.key), entry.etag)

    if up and down:
        return _inside(
            client, source, target, recursive=recursive, threads=threads, force=force, quiet=quiet, then=then,
            moves=moved is not None,
        )  # fmt: skip
    if up:
        at = address.parse(target)
        if recursive:
            return put_all(
                client, source, at, threads=threads, force=force, checksum=checksum, quiet=quiet, then=sent or _ignore
            )
        modified_s = os.stat(source).st_mtime if sent is not None else 0.0
        done = put_one(client, source, at, quiet=quiet)
        (sent or _ignore)(source, modified_s)
        return done
    at = address.parse(source)
    if recursive:
        return get_all(client, at, target, threads=threads, force=force, quiet=quiet, then=then)
    if target == "-":
        raise Invalid("to standard output there is `forebay cat`")
    at = address.parse_object(source)
    etag = client.head(at.bucket, at.key).etag if moved is not None else ""
    done = get_one(client, at, target, quiet=quiet)
    then(ListEntry(at.key, done.size_bytes, etag, 0.0))
    return done


def _ignore(path: str, modified_s: float) -> None:
    """What `cp` does with a file that is there."""


def _inside(
    client: Client,
    source: str,
    target: str,
    *,
    recursive: bool,
    threads: int,
    force: bool,
    quiet: bool,
    then: Callable[[ListEntry], None],
    moves: bool,
) -> Done:
    """Objects to objects."""
    to = address.parse(target)
    done = Done(str(to), "copied_bytes")
    if not recursive:
        one = address.parse_object(source)
        key = to.key if to.key and not to.key.endswith("/") else check_key(to.key + one.key.rsplit("/", 1)[-1])
        if (one.bucket, one.key) == (to.bucket, key):
            raise Invalid(f"{one} would be copied onto itself: name another target")
        etag = client.head(one.bucket, one.key).etag if moves else ""
        written = client.copy(one.bucket, one.key, to.bucket, key)
        then(ListEntry(one.key, written.size_bytes, etag, 0.0))
        done.add(written.size_bytes, written.size_bytes)
        done.target = str(address.Address(to.bucket, key))
        return done.end()
    at = address.parse(source)
    start = to.key if not to.key or to.key.endswith("/") else to.key + "/"
    cut = at.key.partition("*")[0].rfind("/") + 1
    if to.bucket == at.bucket and start.startswith(address.matching(at)[0].prefix):
        raise Invalid(f"{to} lies under {at}, so copies would be copied again: name another target")
    if (to.bucket, start) == (at.bucket, at.key[:cut]):
        raise Invalid(f"{at} would be copied onto itself: name another target")
    there = {} if force else {entry.key: entry for entry in entries(client, address.Address(to.bucket, start))}

    def copy_one(entry: ListEntry, moved: Callable[[int], None]) -> None:
        moved(0)
        key = check_key(start + entry.key[cut:])
        found = there.get(key)
        same = found is not None and found.size_bytes == entry.size_bytes and found.modified_s >= entry.modified_s
        if not same:
            client.copy(at.bucket, entry.key, to.bucket, key)
        then(entry)
        with crew.lock:
            if same:
                done.skip(entry.size_bytes)
            else:
                done.add(entry.size_bytes, entry.size_bytes)

    with Progress(one_line(str(at)), quiet=quiet) as progress:
        crew: Crew[ListEntry] = Crew(copy_one, **entries_crew(), done=done, progress=progress, threads=threads)
        if not crew.run(
            entries(client, at),
            lambda: f"copied to {to}: {counted(done.files, 'object')}; run the same command again for the rest",
        ):
            raise address.nothing_there(at)
    return done
