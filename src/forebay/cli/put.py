"""`forebay put`: copies local files to objects, each whole or not at all.

Theory. One file is `client.put`. For many (`-r`) a few threads work through a directory. A file whose object has its
size and is not older is not sent again, so the same command does the rest. `--checksum` compares bytes instead of times
if the object's ETag allows it (MD5, or the node's own xxh3-128). For other ETags (multipart uploads) the time decides.

Invariants. (1) A file that becomes shorter while it is sent is not stored. (2) A file that fails does not stop the
others; the exit code says that some failed.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from forebay.cli import address, show
from forebay.cli.get import entries
from forebay.cli.jobs import Quiet
from forebay.cli.many import Crew, Done
from forebay.cli.options import Address, AsJson, Debug, Url, open_client
from forebay.cli.outcome import Interrupted, one_line, verb
from forebay.cli.progress import Progress
from forebay.core.errors import Invalid, NotFound
from forebay.core.types import ListEntry, check_key

if TYPE_CHECKING:
    from forebay.client.sync import Client

app = typer.Typer(rich_markup_mode=None, add_completion=False)
PIECE_BYTES = 1 << 20
Checksum = Annotated[bool, typer.Option("--checksum", help="With -r, compare bytes instead of times.")]


@app.command("put")
@verb
def put(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="File or directory; - is standard input.")],
    where: Address,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="All files under the directory.")] = False,
    threads: Annotated[int, typer.Option("--threads", "-j", min=1, max=64, help="With -r, files at once.")] = 8,
    force: Annotated[bool, typer.Option("--force", help="With -r, also send what is there already.")] = False,
    checksum: Checksum = False,
    only_new: Annotated[bool, typer.Option("--only-new", help="Fail if there is an object already.")] = False,
    content_type: Annotated[str, typer.Option("--content-type", metavar="TYPE", help="Such as text/plain.")] = "",
    quiet: Quiet = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Copy local files to objects.

    With -r, files whose object is there already are left out, so the same command again does the rest. With --json:
    {"files", "size_bytes", "sent_bytes", "skipped", "failed", "seconds", "target"}.
    """
    at = address.parse(where)
    if recursive and (only_new or content_type or source == "-"):
        raise Invalid("--only-new, --content-type and standard input are for one object: leave out -r")
    with open_client(url) as client:
        if recursive:
            done = put_all(client, source, at, threads=threads, force=force, checksum=checksum, quiet=quiet or as_json)
        else:
            done = put_one(client, source, at, only_new=only_new, content_type=content_type, quiet=quiet or as_json)
    done.tell(source, as_json=as_json)


# --- one file --------------------------------------------------------------------------------------------------------
def put_one(
    client: Client, source: str, at: address.Address, *, quiet: bool, only_new: bool = False, content_type: str = ""
) -> Done:
    """The file `source`, or standard input, to the object `at`; below it, if it ends with a slash or is a bucket."""
    key = key_for(source, at.key)
    if os.path.isdir(source):
        raise Invalid(f"{source} is a directory: add -r to copy all files under it")
    done = Done(str(address.Address(at.bucket, key)), "sent_bytes")
    total = os.path.getsize(source) if source != "-" and os.path.isfile(source) else None
    sent = 0
    with Progress(one_line(key.rsplit("/", 1)[-1]), quiet=quiet) as progress:

        def moved(size_bytes: int) -> None:
            nonlocal sent
            sent += size_bytes
            progress.at(sent, total)

        data = sys.stdin.buffer if source == "-" else source
        try:
            written = client.put(at.bucket, key, data, content_type=content_type, only_new=only_new, progress=moved)
        except KeyboardInterrupt:
            raise Interrupted("interrupted: nothing was written") from None
    done.add(written.size_bytes, written.size_bytes)
    return done.end()


def key_for(source: str, key: str) -> str:
    """The key that `source` goes to: `key` itself, or the file's name below it if that is empty or ends with `/`."""
    if key and not key.endswith("/"):
        return key
    name = os.path.basename(source)
    if source == "-" or not name:
        raise Invalid(f"{source!r} has no file name: name the object, as in `forebay put … BUCKET/KEY`")
    return check_key(key + name)


# --- all under a directory -------------------------------------------------------------------------------------------
class File(NamedTuple):
    """A file to be sent, and the object that is at its key now, if there is one."""

    path: str
    key: str
    size_bytes: int
    modified_s: float
    there: ListEntry | None


def put_all(
    client: Client,
    folder: str,
    at: address.Address,
    *,
    threads: int,
    force: bool,
    checksum: bool,
    quiet: bool,
    dry_run: bool = False,
    then: Callable[[str, float], None] = lambda path, modified_s: None,
) -> Done:
    """All files under the directory `folder` to objects under the prefix `at`; `then` hears of each path, with
    its time as it was read, that is there whole."""
    if not os.path.isdir(folder):
        if os.path.exists(folder):
            raise Invalid(f"{folder} is not a directory: leave out -r to copy one file")
        raise NotFound(f"there is no directory {folder}: look at the path")
    done = Done(str(at), "sent_bytes")

    def send(file: File, moved: Callable[[int], None]) -> None:
        check_key(file.key)
        if not force and file.there is not None and is_there(file, file.there, checksum=checksum):
            then(file.path, file.modified_s)
            with crew.lock:
                done.skip(file.size_bytes)
            return
        if dry_run:
            with crew.lock:
                show.note(f"would send {one_line(file.path)} to {one_line(file.key)}")
                done.add(file.size_bytes, 0)
            return
        sent = 0

        def count(size_bytes: int) -> None:
            nonlocal sent
            sent += size_bytes
            moved(sent)

        moved(0)
        written = client.put(at.bucket, file.key, file.path, progress=count)
        then(file.path, file.modified_s)
        with crew.lock:
            done.add(written.size_bytes, written.size_bytes)

    with Progress(one_line(str(at)), quiet=quiet) as progress:
        crew: Crew[File] = Crew(
            send,
            name=lambda file: file.path,
            size_bytes=lambda file: file.size_bytes,
            done=done,
            progress=progress,
            threads=threads,
        )
        there = {} if force else {entry.key: entry for entry in entries(client, at)}
        found = crew.run(
            files(folder, at.key, there),
            lambda: f"whole in {at}: {show.counted(done.files, 'file')}; run the same command again for the rest",
        )
    if not found:
        raise NotFound(f"there are no files under {folder}: look at the path")
    return done


def files(folder: str, prefix: str, there: dict[str, ListEntry]) -> Iterator[File]:
    """The regular files under `folder`, by name; links are followed to files, not to directories."""
    start = prefix if not prefix or prefix.endswith("/") else prefix + "/"
    for at, folders, names in os.walk(folder, onerror=_raise):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(at, name)
            key = start + os.path.relpath(path, folder).replace(os.sep, "/")
            try:
                facts = os.stat(path)
            except OSError:
                yield File(path, key, 0, 0.0, None)  # sending it says what is wrong, and that it was left out
                continue
            if stat.S_ISREG(facts.st_mode):
                yield File(path, key, facts.st_size, facts.st_mtime, there.get(key))


def _raise(error: OSError) -> None:
    raise error


def is_there(file: File, entry: ListEntry, *, checksum: bool) -> bool:
    """Whether the object is what the file is, as far as can be told without reading the object."""
    if entry.size_bytes != file.size_bytes:
        return False
    if checksum:
        same = same_bytes(file.path, entry.etag)
        if same is not None:
            return same
    return entry.modified_s >= file.modified_s


def same_bytes(path: str, etag: str) -> bool | None:
    """Whether the file's bytes are those that `etag` was made of; None if it does not tell (`docs/semantics.md`)."""
    hexes, _, mark = etag.lower().partition("-")
    if len(hexes) != 32 or mark not in ("", "x"):
        return None
    digest: Any = hashlib.md5(usedforsecurity=False)
    if mark:
        import xxhash

        digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return bool(digest.hexdigest() == hexes)
