"""An upload cut at every step that touches the disk or the metadata store: what was acknowledged is there afterwards.

The steps of one upload's life are counted; then it is lived again and again, and cut at each step in turn, as a kill of
the process cuts it, or a stop of the machine: bytes that were not synced are lost then, and names that were not synced
may be lost or not.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from forebay.core.errors import NotFound
from forebay.core.messages.calls import UploadPartsCall, UploadsCall, UploadState
from forebay.meta.seam import Entry
from forebay.node.engine.write import parts as files

from .test_uploads import PART, Place

Stop = Literal["kill", "power", "power, names stay"]
OLD, NEW = b"2" * 100_000, b"n" * 70_000
_remove_tree = shutil.rmtree


class Killed(BaseException):
    """The process is dead: nothing it does has an effect any more."""


class Scissors:
    """Stands for `os` in the module under test; cuts before step `at`."""

    def __init__(self, at: int, shadow: Path) -> None:
        self.at = at
        self.steps = 0
        self._shadow = shadow
        self._hidden = 0
        self._undo: list[tuple[str, Callable[[], None]]] = []  # (directory, how) of names that are not synced
        self.synced_bytes: dict[int, int] = {}  # by inode

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def step(self) -> None:
        self.steps += 1
        if self.steps >= self.at:
            raise Killed

    def replace(self, source: str, target: str) -> None:
        self.step()
        os.replace(source, target)
        self._undo.append((os.path.dirname(target), lambda: os.replace(target, source)))

    def link(self, source: str, target: str) -> None:
        self.step()
        os.link(source, target)
        self._undo.append((os.path.dirname(target), lambda: Path(target).unlink(missing_ok=True)))

    def unlink(self, path: str) -> None:
        self.step()
        hidden = self._hide()
        os.replace(path, hidden)  # not unlinked: that could not be undone, and the count of names stays
        self._undo.append((os.path.dirname(path), lambda: os.replace(hidden, path)))

    def remove_tree(self, path: str, ignore_errors: bool) -> None:
        self.step()
        hidden = self._hide()
        if os.path.isdir(path):
            os.replace(path, hidden)
            self._undo.append((os.path.dirname(path), lambda: os.replace(hidden, path)))

    def makedirs(self, path: str, **more: Any) -> None:
        self.step()
        os.makedirs(path, **more)
        self._undo.append((os.path.dirname(path), lambda: _remove_tree(path)))

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        self.step()
        return os.pwrite(fd, data, offset)

    def ftruncate(self, fd: int, size: int) -> None:
        self.step()
        os.ftruncate(fd, size)

    def sync(self, path: str) -> None:
        self.step()
        if os.path.isdir(path):
            self._undo = [each for each in self._undo if each[0] != path]
        else:
            seen = os.stat(path)
            self.synced_bytes[seen.st_ino] = seen.st_size

    def _hide(self) -> str:
        self._hidden += 1
        return str(self._shadow / str(self._hidden))

    def stop_machine(self, place: Place, *, names_stay: bool) -> None:
        """Lose what a machine may lose."""
        if not names_stay:
            for _, undo in reversed(self._undo):
                undo()  # a name that the store took meanwhile is synced with what it commits
        for name in ("parts", "tmp"):
            for path in (place.dir / name).rglob("*"):
                if path.is_file():
                    kept = self.synced_bytes.get(path.stat().st_ino, 0)
                    if path.stat().st_size > kept:
                        os.truncate(path, kept)


class Life:
    """One upload from beginning to end, and what of it was acknowledged."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.upload: UploadState | None = None
        self.etags: dict[int, str] = {}
        self.done = False

    async def live(self) -> None:
        place = self.place
        self.upload = await place.create()
        for number, data in ((1, PART), (2, OLD), (2, NEW)):
            self.etags[number] = await place.send(self.upload, number, data)
        await place.complete(self.upload, *sorted(self.etags.items()))
        self.done = True

    async def go_on(self) -> None:
        """After the stop, as a client does that knows what was acknowledged."""
        place = self.place
        if self.upload is None:
            return
        if not self.done:
            await self._look()
            for number, data in ((1, PART), (2, NEW)):
                if self.etags.get(number) != hashlib.md5(data).hexdigest():
                    try:
                        self.etags[number] = await place.send(self.upload, number, data)
                    except NotFound:
                        raise AssertionError("an acknowledged upload is gone") from None
        await place.complete(self.upload, *sorted(self.etags.items()))
        await place.settled()
        assert hashlib.md5(place.content()).digest() == hashlib.md5(PART + NEW).digest()

    async def _look(self) -> None:
        assert self.upload is not None
        try:
            seen = await self.place.book.parts(UploadPartsCall("b", "k", self.upload.upload_id))
        except NotFound:
            return  # completed, and the answer was lost: completing again will tell
        listed = {part.number: part.etag for part in seen.parts}
        new = hashlib.md5(NEW).hexdigest()
        for number, etag in self.etags.items():
            assert listed.get(number) in (etag, new), f"part {number} was acknowledged"
        if listed.get(2) == new:
            self.etags[2] = new


class Entries:
    """A metadata store whose every change is durable at once."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.step: Callable[[], None] = lambda: None

    async def range(self, prefix: str) -> tuple[list[Entry], int]:
        return [Entry(key, value, 1) for key, value in sorted(self.values.items()) if key.startswith(prefix)], 1

    async def put(self, key: str, value: bytes) -> int:
        self.step()
        self.values[key] = value
        return 1

    async def delete(self, key: str) -> bool:
        self.step()
        return self.values.pop(key, None) is not None

    async def aclose(self) -> None:
        pass


async def _cut(dir: Path, at: int, stop: Stop, patch: pytest.MonkeyPatch) -> bool:
    """Live, cut at a step; whether the life was over before."""
    for name in ("place", "shadow"):
        (dir / name).mkdir()
    place = Place(dir / "place", write="local")
    entries = Entries()
    place.open_meta = lambda: entries  # type: ignore[method-assign]
    await place.open()
    scissors, life = Scissors(at, dir / "shadow"), Life(place)
    with patch.context() as patched:
        patched.setattr(files, "os", scissors)
        patched.setattr(files, "_sync", scissors.sync)
        patched.setattr(files.shutil, "rmtree", scissors.remove_tree)
        entries.step, put_file = scissors.step, place.writing.put_file

        async def put_cut(served: Any, key: str, path: str, *arguments: Any, **more: Any) -> Any:
            scissors.step()
            seen = os.stat(path)
            scissors.synced_bytes[seen.st_ino] = seen.st_size  # the store syncs what it commits
            written = await put_file(served, key, path, *arguments, **more)
            scissors.step()
            return written

        patched.setattr(place.writing, "put_file", put_cut)
        place.strict = False
        try:
            await life.live()
            await place.settled()
            over = True
        except Killed:
            over = False
        over = over and scissors.steps < at
        await place.close()
        if not over and stop != "kill":
            scissors.stop_machine(place, names_stay=stop == "power, names stay")
    for left in (place.dir / "tmp").iterdir():
        left.unlink()  # the store does, at its start
    place.boot_id, place.strict = "another", True
    entries.step = lambda: None
    await place.open()
    await place.book.sweep()
    await life.go_on()
    await place.settled()
    for unheard in (await place.book.uploads(UploadsCall("b"))).uploads:
        await place.abort(unheard)
    assert place.files() == []
    await place.close()
    return over


@pytest.mark.parametrize("stop", ["kill", "power", "power, names stay"])
def test_an_upload_cut_at_every_step_keeps_what_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: Stop
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    at, over = 1, False
    while not over:
        there = tmp_path / str(at)
        there.mkdir()
        over = asyncio.run(_cut(there, at, stop, monkeypatch))
        shutil.rmtree(there)
        at += 1
    assert at > 20, "the steps of a life"
