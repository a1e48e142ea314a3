"""`forebay rm`: delete objects, here and at the backend.

Theory. Deleting cannot be taken back, so a slip is caught where it can be: a name that is not there is an error, many
objects need `-r` and, on a terminal, an answer, a whole bucket needs `--yes` too, and `--dry-run` shows what would go.

Invariant. `--dry-run` asks for listings and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli import address, show
from forebay.cli.get import entries, entries_crew
from forebay.cli.jobs import Quiet
from forebay.cli.many import Crew, Done
from forebay.cli.options import Address, AsJson, Debug, Threads, Url, open_client
from forebay.cli.outcome import Interrupted, Partial, one_line, verb
from forebay.cli.progress import Progress
from forebay.core.errors import Invalid, NotFound
from forebay.core.types import ListEntry

if TYPE_CHECKING:
    from forebay.client.sync import Client

ASK_COUNT = 1000  # objects that are counted before a question

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("rm")
@verb
def rm(
    where: Address,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="All objects in the folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted, and delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With -r, do not ask; also all of a bucket.")] = False,
    threads: Threads = 8,
    quiet: Quiet = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Delete objects, here and at the backend.

    With --json: {"deleted", "size_bytes", "failed", "dry_run", "seconds"}.
    """
    recursive = recursive or "*" in where
    at = address.parse(where) if recursive else address.parse_object(where)
    if recursive and not at.key.rstrip("*") and not (yes or dry_run):
        raise Invalid(f"this deletes every object in {at.bucket}: look with --dry-run, then say --yes")
    done = Done(str(at), "deleted_bytes")
    with open_client(url) as client, Progress(one_line(str(at)), quiet=quiet or as_json) as progress:

        def delete(entry: ListEntry, moved: Callable[[int], None]) -> None:
            moved(0)
            if not dry_run:
                client.delete(at.bucket, entry.key)
            elif not as_json:
                print(f"would delete {one_line(str(address.Address(at.bucket, entry.key)))}")
            with crew.lock:
                done.add(entry.size_bytes, 0)

        threads = 1 if dry_run else threads
        crew: Crew[ListEntry] = Crew(delete, **entries_crew(), done=done, progress=progress, threads=threads)
        if recursive:
            if not (yes or dry_run):
                _ask(client, at)
            found = crew.run(
                entries(client, at), lambda: f"deleted: {show.counted(done.files, 'object')}; the others are there"
            )
            if not found:
                raise address.nothing_there(at)
        else:
            try:
                got = client.head(at.bucket, at.key)
            except NotFound as error:
                raise address.no_object(client, at, error) from error
            crew.run([ListEntry(at.key, got.size_bytes, got.etag, 0.0)], lambda: "look whether it is there")
    if as_json:
        seconds = round(done.ended_s - done.started_s, 6)
        show.document(
            {
                "deleted": 0 if dry_run else done.files,
                "size_bytes": done.size_bytes,
                "failed": done.failed,
                "dry_run": dry_run,
                "seconds": seconds,
            }
        )
    else:
        what = show.counted(done.files, "object")
        print(f"{one_line(str(at))}: {what}, {show.size(done.size_bytes)} {'would go' if dry_run else 'deleted'}")
    if done.failed:
        of = show.counted(done.files + done.failed, "object")
        raise Partial(f"still there: {done.failed} of {of}; run the same command again")


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _ask(client: Client, at: address.Address) -> None:
    """Whoever sits at a terminal says whether he means it, when it is more than one object."""
    if not _is_terminal():
        return
    some = list(islice(entries(client, at), ASK_COUNT))
    if len(some) < 2:
        return
    count = f"{len(some)}" if len(some) < ASK_COUNT else f"{ASK_COUNT} or more"
    if not typer.confirm(f"Delete {count} objects at {one_line(str(at))}?", err=True):
        raise Interrupted("nothing is deleted")
