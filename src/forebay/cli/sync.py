"""`forebay sync`: make a folder of a bucket like a local directory, or the other way round.

Theory. The copying is `put -r`'s and `get -r`'s, which leave out what is there already. With `--delete` what the source
does not have goes from the target afterwards, and only if everything was copied: an empty or missing source, or one
that broke half-way, deletes nothing. An object that was written meanwhile stays.

Invariants. (1) `--dry-run` changes nothing. (2) Nothing outside the target's folder is deleted.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli import address, show
from forebay.cli.cp import SCHEMES
from forebay.cli.get import entries, get_all
from forebay.cli.jobs import Quiet
from forebay.cli.options import AsJson, Debug, Url, open_client
from forebay.cli.outcome import one_line, verb
from forebay.cli.put import Checksum, put_all
from forebay.core.errors import Invalid

if TYPE_CHECKING:
    from forebay.client.sync import Client

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("sync")
@verb
def sync(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="s3://bucket/folder, or a local directory.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The other of the two.")],
    delete: Annotated[bool, typer.Option("--delete", help="Then delete in TARGET what SOURCE does not have.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")] = False,
    checksum: Checksum = False,
    threads: Annotated[int, typer.Option("--threads", "-j", min=1, max=64, help="Objects at once.")] = 8,
    quiet: Quiet = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a bucket's folder like a directory here, or the other way.

    What is there already is left out. With --json: {"files", "size_bytes", "fetched_bytes" or "sent_bytes", "skipped",
    "failed", "seconds", "target", "deleted", "dry_run"}.
    """
    up = target.startswith(SCHEMES)
    if up == source.startswith(SCHEMES):
        raise Invalid("one side is s3://BUCKET/FOLDER, the other a local directory; inside the node there is `cp -r`")
    at = _folder(target if up else source)
    silent = quiet or as_json or dry_run
    with open_client(url) as client:
        if up:
            done = put_all(
                client, source, at, threads=threads, force=False, checksum=checksum, quiet=silent, dry_run=dry_run
            )
        else:
            done = get_all(client, at, target, threads=threads, force=False, quiet=silent, dry_run=dry_run)
        deleted = 0
        if delete and not done.failed:
            deleted = (
                _objects(client, at, source, dry_run=dry_run) if up else _files(client, at, target, dry_run=dry_run)
            )
    if not as_json:
        if delete:
            print(f"{deleted} {'would be deleted' if dry_run else 'deleted'} in {one_line(target)}")
        if not dry_run:
            done.tell(source, as_json=False)
            return
        what = f"{show.counted(done.files - done.skipped, 'file')} to copy; there already: {done.skipped}"
        print(f"{one_line(source)} -> {one_line(done.target)}: {what}")
    else:
        show.document({**done.fields(), "deleted": deleted, "dry_run": dry_run})
    done.check()


def _folder(text: str) -> address.Address:
    at = address.parse(text)
    return at if not at.key or at.key.endswith("/") else at._replace(key=f"{at.key}/")


def _objects(client: Client, at: address.Address, folder: str, *, dry_run: bool) -> int:
    """Delete the objects under `at` that have no file in `folder`; how many."""
    count = 0
    for entry in entries(client, at):
        if os.path.lexists(os.path.join(folder, entry.key[len(at.key) :])):
            continue
        if dry_run:
            show.note(f"would delete {one_line(str(address.Address(at.bucket, entry.key)))}")
        else:
            client.delete(at.bucket, entry.key, etag=entry.etag)
        count += 1
    return count


def _files(client: Client, at: address.Address, folder: str, *, dry_run: bool) -> int:
    """Delete the files in `folder` that are no objects under `at`; how many."""
    names = {entry.key[len(at.key) :] for entry in entries(client, at)}
    count = 0
    for where, _, files in os.walk(folder):
        for name in sorted(files):
            path = os.path.join(where, name)
            if os.path.relpath(path, folder).replace(os.sep, "/") in names:
                continue
            if dry_run:
                show.note(f"would delete {one_line(path)}")
            else:
                os.unlink(path)
            count += 1
    return count
