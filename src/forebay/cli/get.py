"""`forebay get`: objects to local files, whole or not at all, resumed where it was cut.

Theory. One object is `client.download`: bytes go to a part file beside the target, which is renamed when it is whole,
so Ctrl-C leaves the old target and a part from which the same command goes on. Many objects (`-r`) are the listing's
pages through a few threads; a file that is there already with the object's size and time is not fetched again, which
is what makes the whole resumable: the same command again does the rest.

Invariants. (1) A key never names a file outside the target directory. (2) One object that fails does not stop the
others; the exit code says that some failed.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import address, show
from forebay.cli.jobs import Quiet
from forebay.cli.options import Address, AsJson, Debug, Url, open_client
from forebay.cli.outcome import Interrupted, Partial, as_forebay, one_line, verb
from forebay.cli.progress import Progress
from forebay.core.errors import ForebayError, Invalid, NotFound
from forebay.core.types import ListEntry
from forebay.ports import clock

if TYPE_CHECKING:
    from forebay.client.sync import Client

app = typer.Typer(rich_markup_mode=None, add_completion=False)
COMPLAINTS_MAX = 10


@app.command("get")
@verb
def get(
    where: Address,
    target: Annotated[str, typer.Argument(metavar="[TARGET]", help="File or directory; - is standard output.")] = ".",
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="All objects under the prefix.")] = False,
    threads: Annotated[int, typer.Option("--threads", "-j", min=1, max=64, help="With -r, objects at once.")] = 8,
    force: Annotated[bool, typer.Option("--force", help="With -r, also fetch what is there already.")] = False,
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
        if recursive:
            at = address.parse(where)
            done = _get_all(client, at, target, threads=threads, force=force, quiet=quiet or as_json)
        else:
            at = address.parse_object(where)
            if target == "-":
                from forebay.cli.cat import stdout_fd

                sys.stdout.flush()
                client.get_to_fd(at.bucket, at.key, stdout_fd())
                return
            done = _get_one(client, at, target, quiet=quiet or as_json)
    if as_json:
        show.document(done.fields())
    else:
        print(done.sentence(at))
    if done.failed:
        raise Partial(
            f"{done.failed} of {done.files + done.failed} objects failed: run the same command again for them"
        )


@dataclass
class Done:
    """What was done, for the summary. `fetched_bytes` leaves out what was there already."""

    target: str
    started_s: float
    files: int = 0
    size_bytes: int = 0
    fetched_bytes: int = 0
    skipped: int = 0
    failed: int = 0
    complaints: list[str] = field(default_factory=list)
    ended_s: float = 0.0

    def fields(self) -> dict[str, Any]:
        return {
            "files": self.files,
            "size_bytes": self.size_bytes,
            "fetched_bytes": self.fetched_bytes,
            "skipped": self.skipped,
            "failed": self.failed,
            "seconds": round(self.ended_s - self.started_s, 6),
            "target": self.target,
        }

    def sentence(self, at: address.Address) -> str:
        seconds = max(self.ended_s - self.started_s, 1e-9)
        what = show.size(self.size_bytes)
        if self.files != 1 or self.skipped:
            what = f"{self.files} files, {what}"
        there = f" ({self.skipped} were there already)" if self.skipped else ""
        if self.fetched_bytes < self.size_bytes and not self.skipped:
            there = f" (resumed: {show.size(self.size_bytes - self.fetched_bytes)} were there already)"
        pace = f"{show.duration(seconds)}, {show.rate(self.fetched_bytes / seconds)}"
        return f"{one_line(str(at))} -> {one_line(self.target)}: {what} in {pace}{there}"


# --- one object ------------------------------------------------------------------------------------------------------
def _get_one(client: Client, at: address.Address, target: str, *, quiet: bool) -> Done:
    path = file_for(at.key, target)
    done = Done(path, clock.monotonic_s())
    with Progress(one_line(at.key.rsplit("/", 1)[-1]), quiet=quiet) as progress:
        try:
            got = client.download(at.bucket, at.key, path, progress=progress.at)
        except (ForebayError, OSError, KeyboardInterrupt) as error:
            raise with_hint(error, path) from error
    done.files, done.size_bytes = 1, got.size_bytes
    done.fetched_bytes = got.size_bytes - got.resumed_bytes
    done.ended_s = clock.monotonic_s()
    return done


def file_for(key: str, target: str) -> str:
    """The file that `key` goes to: `target` itself, or its last part inside `target` if that is a directory."""
    if not os.path.isdir(target) and not target.endswith("/"):
        return target
    name = key.rsplit("/", 1)[-1]
    if name in ("", ".", "..") or "\0" in name:
        raise Invalid(f"the key {key!r} does not end in a file name: name the target file, as in `forebay get … FILE`")
    return os.path.join(target, name)


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
    path = key[prefix.rfind("/") + 1 :]
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise Invalid(
            f"the key {key!r} is not a safe file name (empty, '.' or '..' as a part): get it alone, with a target"
        )
    return path


class Stopped(Exception):
    """Ctrl-C was pressed: a worker gives up the object it is at."""


@dataclass
class _Work:
    """What the workers share."""

    client: Client
    at: address.Address
    target: str
    done: Done
    progress: Progress
    force: bool
    units: queue.Queue[ListEntry | None]
    stop: bool = False
    fatal: ForebayError | None = None
    listed_bytes: int = 0
    all_listed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    moving: dict[str, int] = field(default_factory=dict)  # bytes of objects that are not whole yet


def _get_all(client: Client, at: address.Address, target: str, *, threads: int, force: bool, quiet: bool) -> Done:
    if os.path.exists(target) and not os.path.isdir(target):
        raise Invalid(f"{target} is not a directory: with -r the target is one")
    done = Done(target, clock.monotonic_s())
    listed = 0
    with Progress(one_line(str(at)), quiet=quiet) as progress:
        work = _Work(client, at, target, done, progress, force, queue.Queue(maxsize=4 * threads))
        workers = [threading.Thread(target=_worker, args=(work,), daemon=True) for _ in range(threads)]
        for worker in workers:
            worker.start()
        try:
            for page in client.list_pages(at.bucket, at.key):
                for entry in page.entries:
                    listed += 1
                    work.listed_bytes += entry.size_bytes
                    _offer(work, entry)
            work.all_listed = True
            for _ in workers:
                _offer(work, None)
            for worker in workers:
                while worker.is_alive():
                    worker.join(0.1)
        except KeyboardInterrupt:
            work.stop = True
            raise Interrupted(
                f"interrupted: {done.files} files are whole in {target}; run the same command again for the rest"
            ) from None
        except BaseException:
            work.stop = True
            raise
    if work.fatal is not None:
        raise work.fatal
    done.ended_s = clock.monotonic_s()
    if not listed:
        raise NotFound(f"nothing begins with {at}: see `forebay ls {at.bucket}/`", code="NoSuchKey")
    for text in done.complaints:
        show.note(f"forebay: {text}")
    return done


def _offer(work: _Work, entry: ListEntry | None) -> None:
    """Put a unit before the workers; `work.fatal` ends the waiting, since nobody takes units then."""
    while work.fatal is None:
        try:
            work.units.put(entry, timeout=0.1)
            return
        except queue.Full:
            continue
    raise work.fatal


def _worker(work: _Work) -> None:
    while not work.stop and work.fatal is None:
        entry = work.units.get()
        if entry is None:
            return
        try:
            _unit(work, entry)
        except Stopped:
            return
        except (ForebayError, OSError) as error:
            found = as_forebay(error)
            with work.lock:
                work.moving.pop(entry.key, None)
                if found.code == "NoNode":
                    work.fatal = found
                work.done.failed += 1
                if len(work.done.complaints) < COMPLAINTS_MAX:
                    work.done.complaints.append(f"{one_line(entry.key)}: {one_line(found.message)}")
        except BaseException as error:
            work.fatal = ForebayError(f"unexpected {type(error).__name__}: {error}; please report it")
            return


def _unit(work: _Work, entry: ListEntry) -> None:
    if entry.key.endswith("/") and entry.size_bytes == 0:
        return  # a marker that stands for a directory
    path = os.path.join(work.target, relative(entry.key, work.at.key))
    if not work.force and _is_there(path, entry):
        with work.lock:
            work.done.skipped += 1
            work.done.files += 1
            work.done.size_bytes += entry.size_bytes
        return
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)

    def moved(done_bytes: int, _: int) -> None:
        if work.stop:
            raise Stopped
        with work.lock:
            work.moving[entry.key] = done_bytes
            at = work.done.size_bytes + sum(work.moving.values())
        work.progress.at(at, work.listed_bytes if work.all_listed else None)

    got = work.client.download(work.at.bucket, entry.key, path, progress=moved)
    os.utime(path, (entry.modified_s, entry.modified_s))
    with work.lock:
        work.moving.pop(entry.key, None)
        work.done.files += 1
        work.done.size_bytes += got.size_bytes
        work.done.fetched_bytes += got.size_bytes - got.resumed_bytes


def _is_there(path: str, entry: ListEntry) -> bool:
    try:
        at = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return at.st_size == entry.size_bytes and int(at.st_mtime) == int(entry.modified_s)
