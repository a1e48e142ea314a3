"""Downloads an object to a file, whole or not at all, and resumes where it was cut.

Theory. Bytes go to a *part* file beside the target, and the complete part is renamed over the target. So the target is
always the old file or the new one. The part's name holds a token of (bucket, key, ETag, boot). A later download finds
the part and asks the node for the current ETag. Only if that gives the same token does it go on from the part's length,
with `If-Match`, so two versions never meet in one file. The boot is in the token because after a machine stop the tail
of an unsynced file may be zeros; after a killed process it is whole. An exclusive `flock` on the part keeps two
downloads to one target apart.

Rejected: a side file with the ETag (two files to keep in step); syncing the target (a cache's client can fetch again;
who needs durability syncs).

Invariants. (1) A part holds a prefix of exactly the version that its token names. (2) After locking, the name still
leads to the locked file; otherwise it is opened anew, since another download may have renamed it to the target. (3) A
target that is no regular file (a device, a pipe) is written to directly, never replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable
from typing import Any, NamedTuple

from forebay.client import flows
from forebay.client.sinks import IntoFd
from forebay.core.errors import Busy, Corrupt, Invalid, Precondition
from forebay.core.messages.http1 import Response
from forebay.core.types import RangeSpec
from forebay.ports import chance, machine

try:
    import fcntl
except ImportError:  # not on every platform the client runs on: there two downloads to one target are not kept apart
    fcntl = None  # type: ignore[assignment]

Progress = Callable[[int, int], None]  # bytes done of the whole object, size of the object
Run = Callable[[Any], Any]  # Client.run: drives a flow to its result


class Downloaded(NamedTuple):
    """What a download did: `resumed_bytes` were there from an earlier one."""

    size_bytes: int
    resumed_bytes: int
    etag: str


class Part:
    """A locked part file. `size_bytes` is its length when it was opened."""

    def __init__(self, path: str) -> None:
        self.path = path
        while True:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                if fcntl is not None:
                    fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                at = os.fstat(self.fd)
                if os.path.samestat(os.stat(path), at):
                    break
            except BlockingIOError:
                os.close(self.fd)
                raise Busy(
                    f"another download is writing this file (its part is {path}): wait for it, or choose another target"
                ) from None
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(self.fd)
                raise
            os.close(self.fd)
        self.size_bytes = at.st_size

    def close(self) -> None:
        os.close(self.fd)


class _IntoPart:
    """A sink that writes to a part from its end on; without one, it opens one when the answer has said the version."""

    def __init__(self, part: Part | None, name_part: Callable[[str], str], progress: Progress | None) -> None:
        self.part = part
        self.etag = ""
        self._name_part = name_part
        self._progress = progress
        self._done = part.size_bytes if part else 0
        self._into: IntoFd

    def begin(self, response: Response) -> None:
        facts = flows.got(response)
        self.etag = facts.etag
        if self.part is None:
            self.part = Part(self._name_part(facts.etag))
            os.ftruncate(self.part.fd, 0)
        if facts.start != self._done:
            raise Corrupt(f"asked for bytes from {self._done} on and the answer starts at {facts.start}: try again")
        os.lseek(self.part.fd, self._done, os.SEEK_SET)
        self._into = IntoFd(self.part.fd)
        self._size = facts.size_bytes
        if self._progress is not None:
            self._progress(self._done, self._size)

    def buffer(self) -> memoryview:
        return self._into.buffer()

    def wrote(self, size_bytes: int) -> None:
        self._into.wrote(size_bytes)
        self._done += size_bytes
        if self._progress is not None:
            self._progress(self._done, self._size)


def download(run: Run, bucket: str, key: str, path: str, progress: Progress | None = None) -> Downloaded:
    """`bucket/key` to the file `path`. See the module's header for what is promised when it is cut short.

    `Busy` if another download writes to the same target; `OSError` when the target's directory cannot be written.
    """
    target = os.path.realpath(path)
    if os.path.isdir(target):
        raise Invalid(f"{path} is a directory: name a file in it")
    if os.path.exists(target) and not stat.S_ISREG(os.stat(target).st_mode):
        return _straight(run, bucket, key, target, progress)
    folder, name = os.path.split(target)
    mark = part_mark(name)

    def name_part(etag: str) -> str:
        token = _token(bucket, key, etag) if etag else chance.token_hex(8)
        return os.path.join(folder, f"{mark}{token}.part")

    found = _resumable(run, bucket, key, folder, mark, name_part)
    if found is not None:
        part, facts = found
        try:
            return _resume(run, bucket, key, target, facts, _IntoPart(part, name_part, progress))
        except Precondition:  # it changed since we looked: begin again with what it is now
            os.unlink(part.path)
        finally:
            part.close()
    return _fresh(run, bucket, key, target, _IntoPart(None, name_part, progress))


def _resume(run: Run, bucket: str, key: str, target: str, facts: flows.Got, sink: _IntoPart) -> Downloaded:
    assert sink.part is not None
    have = sink.part.size_bytes
    if have < facts.size_bytes:
        facts, _ = run(flows.get(bucket, key, sink=sink, range=RangeSpec(have, None), etag=facts.etag))
    _publish(sink.part, facts.size_bytes, target)
    return Downloaded(facts.size_bytes, have, facts.etag)


def _fresh(run: Run, bucket: str, key: str, target: str, sink: _IntoPart) -> Downloaded:
    try:
        facts, _ = run(flows.get(bucket, key, sink=sink))
        assert sink.part is not None, "a success began the sink"
        _publish(sink.part, facts.size_bytes, target)
        return Downloaded(facts.size_bytes, 0, facts.etag)
    except BaseException:
        if sink.part is not None and (not sink.etag or os.fstat(sink.part.fd).st_size == 0):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(sink.part.path)  # nobody could go on from it
        raise
    finally:
        if sink.part is not None:
            sink.part.close()


def _publish(part: Part, size_bytes: int, target: str) -> None:
    """Make the whole part the target."""
    size = os.fstat(part.fd).st_size
    if size != size_bytes:
        os.unlink(part.path)
        raise Corrupt(f"{size} bytes arrived of {size_bytes}; the part was removed: try again")
    with contextlib.suppress(FileNotFoundError):
        os.fchmod(part.fd, stat.S_IMODE(os.stat(target).st_mode))
    try:
        os.replace(part.path, target)
    except IsADirectoryError:  # in a bucket `a` may be an object and the folder of `a/b`
        os.unlink(part.path)
        raise Invalid(
            f"{target} has become a directory: on a disk a name is a file or a folder, so name another"
        ) from None


def kept_bytes(path: str) -> int:
    """How many bytes of an unfinished download to `path` lie beside it, ready to be resumed."""
    folder, name = os.path.split(os.path.realpath(path))
    sizes = [0]
    for part in _parts(folder, part_mark(name)):
        with contextlib.suppress(OSError):
            sizes.append(os.stat(part).st_size)
    return max(sizes)


def _straight(run: Run, bucket: str, key: str, target: str, progress: Progress | None) -> Downloaded:
    fd = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
    done = 0

    def count(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        if progress is not None:
            progress(done, done)

    try:
        facts, _ = run(flows.get(bucket, key, sink=IntoFd(fd, count)))
    finally:
        os.close(fd)
    return Downloaded(facts.size_bytes, 0, facts.etag)


def part_mark(name: str) -> str:
    """How the names of all parts of a target called `name` begin."""
    short = name.encode("utf-8", "surrogateescape")[:48].decode("utf-8", "ignore")
    return f".{short}.{_hash(name)[:8]}.forebay-"


def _token(bucket: str, key: str, etag: str) -> str:
    return _hash("\0".join((bucket, key, etag, _boot())))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def _boot() -> str:
    try:
        return machine.boot_id()
    except OSError:
        return ""


def _resumable(
    run: Run, bucket: str, key: str, folder: str, mark: str, name_part: Callable[[str], str]
) -> tuple[Part, flows.Got] | None:
    """The locked part of the version that the node has now, if one was left; parts of other versions are removed."""
    if not _parts(folder, mark):
        return None
    facts: flows.Got = run(flows.head(bucket, key))
    wanted = name_part(facts.etag) if facts.etag else ""
    _remove_parts(folder, mark, but=wanted)
    if not wanted or not os.path.exists(wanted):
        return None
    part = Part(wanted)
    if 0 < part.size_bytes <= facts.size_bytes:
        return part, facts
    os.unlink(part.path)
    part.close()
    return None


def _parts(folder: str, mark: str) -> list[str]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(os.path.join(folder, name) for name in names if name.startswith(mark) and name.endswith(".part"))


def _remove_parts(folder: str, mark: str, but: str = "") -> None:
    for path in _parts(folder, mark):
        if path == but:
            continue
        with contextlib.suppress(Busy, OSError):
            part = Part(path)  # a locked one is at work: leave it alone
            os.unlink(path)
            part.close()
