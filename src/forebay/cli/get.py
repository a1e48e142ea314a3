"""`forebay get`: copies objects to local files, each whole or not at all, and resumes what was cut.

Theory. One object is `client.download`: bytes go to a part file beside the target, and the complete part is renamed.
Ctrl-C leaves the old target and the part, from which the same command goes on. For many objects (`-r`) a few threads
work through the listing. A file that has the object's size and time is not fetched again, so the same command does the
rest.

Invariants. (1) No key names a file outside the target directory. (2) An object that fails does not stop the others; the
exit code says that some failed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import address, show
from forebay.cli.cat import Member, stdout_fd
from forebay.cli.jobs import Quiet
from forebay.cli.many import Crew, Done
from forebay.cli.options import Address, AsJson, Debug, Threads, Url, open_client
from forebay.cli.outcome import Interrupted, Local, as_forebay, one_line, verb
from forebay.cli.progress import Progress
from forebay.client import flows
from forebay.client.sinks import IntoFd
from forebay.core.errors import ForebayError, Invalid, NotFound
from forebay.core.types import ListEntry

if TYPE_CHECKING:
    from forebay.client.sync import Client

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("get")
@verb
def get(
    where: Address,
    target: Annotated[str, typer.Argument(metavar="[TARGET]", help="File or directory; - is standard output.")] = ".",
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="All objects in the folder.")] = False,
    threads: Threads = 8,
    force: Annotated[bool, typer.Option("--force", help="With -r, also fetch what is there already.")] = False,
    member: Member = None,
    quiet: Quiet = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Copy objects to local files.

    A copy that was cut short goes on where it stopped when the same command is run again. With --json:
    {"files", "size_bytes", "fetched_bytes", "skipped", "failed", "seconds", "target"}.
    """
    with open_client(url) as client:
        if member is not None:
            if recursive:
                raise Invalid("-r is for objects: get the shard and unpack it, or give one --member")
            at = address.parse_object(where)
            done = get_member(client, at, member, target)
        elif recursive or "*" in where:
            at = address.parse(where)
            done = get_all(client, at, target, threads=threads, force=force, quiet=quiet or as_json)
        else:
            at = address.parse_object(where)
            if target == "-":
                sys.stdout.flush()
                client.get_to_fd(at.bucket, at.key, stdout_fd())
                return
            done = get_one(client, at, target, quiet=quiet or as_json)
    done.tell(str(at), as_json=as_json)


# --- one object ------------------------------------------------------------------------------------------------------
def get_one(client: Client, at: address.Address, target: str, *, quiet: bool) -> Done:
    """One object to the file `target`, or into it if it is a directory."""
    path = place_for(at.key, target)
    done = Done(path, "fetched_bytes")
    with Progress(one_line(at.key.rsplit("/", 1)[-1]), quiet=quiet) as progress:
        try:
            got = client.download(at.bucket, at.key, path, progress=progress.at)
        except NotFound as error:
            raise address.no_object(client, at, error) from error
        except (ForebayError, OSError, KeyboardInterrupt) as error:
            raise with_hint(error, path) from error
    done.add(got.size_bytes, got.size_bytes - got.resumed_bytes)
    return done.end()


def get_member(client: Client, at: address.Address, member: str, target: str) -> Done:
    """One file in a shard to the file `target`, or into it if it is a directory; whole or not at all."""
    if target == "-":
        sys.stdout.flush()
        client.run(flows.get(at.bucket, at.key, sink=IntoFd(stdout_fd()), member=member))
        raise typer.Exit
    path = place_for(member, target)
    done = Done(path, "fetched_bytes")
    part = os.path.join(os.path.dirname(path), f".{os.path.basename(path)[:200]}.forebay-{os.getpid()}.part")
    try:
        with open(part, "xb", buffering=0) as file:
            got, _ = client.run(flows.get(at.bucket, at.key, sink=IntoFd(file.fileno()), member=member))
        os.replace(part, path)
    except OSError as error:
        raise as_forebay(error) from error
    finally:
        if os.path.exists(part):
            os.unlink(part)
    done.add(got.size_bytes, got.size_bytes)
    return done.end()


def file_for(key: str, target: str) -> str:
    """The file that `key` goes to: `target` itself, or its last part inside `target` if that is a directory."""
    if not os.path.isdir(target) and not target.endswith("/"):
        return target
    name = key.rsplit("/", 1)[-1]
    if name in ("", ".", "..") or "\0" in name:
        raise Invalid(f"the key {key!r} does not end in a file name: name the target file, as in `forebay get … FILE`")
    return os.path.join(target, name)


def place_for(key: str, target: str) -> str:
    """As `file_for`; `Local` if its directory is not there."""
    path = file_for(key, target)
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise Local(f"there is no directory {folder}: make it, or choose another target")
    return path


def with_hint(error: BaseException, path: str) -> ForebayError:
    """The error, with a word on what is kept of the download."""
    from forebay.client.download import kept_bytes

    found = as_forebay(error)
    kept = kept_bytes(path)
    hint = f"{show.size(kept)} are kept; run the same command again to go on from there" if kept else ""
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(f"interrupted: {hint or 'nothing was written'}")
    if hint:
        return type(found)(f"{found.message} ({hint})", code=found.code, retry_after_s=found.retry_after_s)
    return found


# --- all under a prefix ----------------------------------------------------------------------------------------------
def relative(key: str, prefix: str) -> str:
    """The path below the target directory for `key`; `Invalid` for a key that is not a safe relative path.

    What `prefix` holds up to its last slash is left out, so `get -r corpus/train/` puts `train/a` at `a`.
    """
    path = key[prefix.partition("*")[0].rfind("/") + 1 :]
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise Invalid(
            f"the key {key!r} is not a safe file name (empty, '.' or '..' as a part): get it alone, with a target"
        )
    return path


def get_all(
    client: Client,
    at: address.Address,
    target: str,
    *,
    threads: int,
    force: bool,
    quiet: bool,
    dry_run: bool = False,
    then: Callable[[ListEntry], None] = lambda entry: None,
) -> Done:
    """All objects that `at` selects to files in the directory `target`; `then` hears of each that is there whole."""
    if os.path.exists(target) and not os.path.isdir(target):
        raise Invalid(f"{target} is not a directory: with -r the target is one")
    done = Done(target, "fetched_bytes")

    def fetch(entry: ListEntry, moved: Callable[[int], None]) -> None:
        if entry.key.endswith("/") and entry.size_bytes == 0:
            return  # a marker that stands for a directory
        path = os.path.join(target, relative(entry.key, at.key))
        if not force and _is_there(path, entry):
            then(entry)
            with crew.lock:
                done.skip(entry.size_bytes)
            return
        if dry_run:
            with crew.lock:
                show.note(f"would fetch {one_line(entry.key)} to {one_line(path)}")
                done.add(entry.size_bytes, 0)
            return
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        got = client.download(at.bucket, entry.key, path, progress=lambda done_bytes, _: moved(done_bytes))
        os.utime(path, (entry.modified_s, entry.modified_s))
        then(entry)
        with crew.lock:
            done.add(got.size_bytes, got.size_bytes - got.resumed_bytes)

    with Progress(one_line(str(at)), quiet=quiet) as progress:
        crew = Crew(fetch, **entries_crew(), done=done, progress=progress, threads=threads)
        found = crew.run(
            entries(client, at),
            lambda: f"whole in {target}: {show.counted(done.files, 'file')}; run the same command again for the rest",
        )
    if not found:
        raise address.nothing_there(at)
    return done


def entries(client: Client, at: address.Address) -> Iterator[ListEntry]:
    """All objects that `at` selects, as the backend has them now."""
    (key, prefix), form = address.matching(at)
    if key:
        yield from (entry for entry in client.list_page(at.bucket, key, limit=1).entries if entry.key == key)
    for page in client.list_pages(at.bucket, prefix):
        yield from (entry for entry in page.entries if form is None or form.fullmatch(entry.key))


def entries_crew() -> dict[str, Any]:
    """What a crew is told of units that are entries of a listing."""
    return {"name": lambda entry: entry.key, "size_bytes": lambda entry: entry.size_bytes}


def _is_there(path: str, entry: ListEntry) -> bool:
    try:
        at = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return at.st_size == entry.size_bytes and int(at.st_mtime) == int(entry.modified_s)
