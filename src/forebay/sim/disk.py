"""A disk that loses what was not synced, tears what it was writing, fills up and rots.

Theory. What a program sees and what is on the platter differ by the operations that were not synced yet, so those are
kept in a list beside the state as of the last time all was safe. A machine crash replays a part of that list: every
operation that a sync covers; of the others metadata up to some point (a journal) or, in a harsher mood, any of them;
of the data writes any, each perhaps only in some of its sectors. A process crash loses nothing.

`fsync` of a file covers its bytes, size and attributes, not its name; `fsync` of a directory covers the names in it.
That is less than real filesystems give, which is the point.

Invariant. `crash` leaves a state that some filesystem may leave; what was synced is in it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Literal

from forebay.sim.schedule import Schedule

SECTOR_BYTES = 16

Kind = Literal["create", "attr", "write", "punch", "rename", "unlink"]


class DiskFull(Exception):
    """No space is left."""


@dataclass(slots=True)
class File:
    """An inode: bytes and attributes."""

    number: int
    data: bytearray
    attributes: dict[str, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class _Operation:
    kind: Kind
    number: int  # of the file
    path: str = ""
    target: str = ""
    offset: int = 0
    data: bytes = b""
    synced: bool = False


@dataclass(slots=True)
class _State:
    names: dict[str, int] = field(default_factory=dict)
    files: dict[int, File] = field(default_factory=dict)

    def apply(self, operation: _Operation) -> None:
        file = self.files.get(operation.number)
        match operation.kind:
            case "create":
                self.files[operation.number] = File(operation.number, bytearray(operation.offset))
                self.names[operation.path] = operation.number
            case "attr" if file:
                file.attributes[operation.path] = operation.data
            case "write" if file:
                file.data[operation.offset : operation.offset + len(operation.data)] = operation.data
            case "punch" if file:
                end = min(operation.offset + int(operation.target), len(file.data))
                file.data[operation.offset : end] = bytes(end - operation.offset)
            case "rename" if file:
                if self.names.get(operation.path) == operation.number:
                    del self.names[operation.path]
                self.names[operation.target] = operation.number
            case "unlink":
                self.names.pop(operation.path, None)
            case _:
                pass  # about a file whose creation was lost


def directory_of(path: str) -> str:
    return path.rpartition("/")[0]


class SimDisk:
    """One volume's disk. Paths are plain strings; `full` makes creating and writing fail."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._safe = _State()
        self._now = _State()
        self._unsafe: list[_Operation] = []
        self._next = 1
        self.full = False

    # --- as a program sees it ----------------------------------------------------------------------------------------
    def create(self, path: str, size_bytes: int) -> File:
        self._check_room()
        assert path not in self._now.names, f"{path} exists"
        number, self._next = self._next, self._next + 1
        self._do(_Operation("create", number, path, offset=size_bytes))
        return self._now.files[number]

    def open(self, path: str) -> File:
        """The file, which stays readable after its name is gone."""
        return self._now.files[self._now.names[path]]

    def exists(self, path: str) -> bool:
        return path in self._now.names

    def write(self, file: File, offset: int, data: bytes) -> None:
        self._check_room()
        self._do(_Operation("write", file.number, offset=offset, data=bytes(data)))

    def set_attribute(self, path: str, name: str, value: bytes) -> None:
        self._do(_Operation("attr", self._now.names[path], name, data=value))

    def punch(self, path: str, start: int, end: int) -> None:
        self._do(_Operation("punch", self._now.names[path], offset=start, target=str(end - start)))

    def rename(self, source: str, target: str) -> None:
        self._do(_Operation("rename", self._now.names[source], source, target))

    def unlink(self, path: str) -> None:
        if path in self._now.names:
            self._do(_Operation("unlink", self._now.names[path], path))

    def sync_file(self, path: str) -> None:
        number = self._now.names[path]
        for operation in self._unsafe:
            if operation.number == number and operation.kind in ("create", "attr", "write", "punch"):
                operation.synced = True

    def sync_directory(self, path: str) -> None:
        directory = directory_of(path)
        for operation in self._unsafe:
            if operation.kind in ("rename", "unlink", "create") and directory in (
                directory_of(operation.path),
                directory_of(operation.target),
            ):
                operation.synced = True

    def list(self) -> list[str]:
        return sorted(self._now.names)

    def _do(self, operation: _Operation) -> None:
        self._now.apply(operation)
        self._unsafe.append(operation)

    def _check_room(self) -> None:
        if self.full:
            raise DiskFull

    # --- what may happen to it ---------------------------------------------------------------------------------------
    def settle(self) -> None:
        """The kernel wrote everything back: nothing is at risk."""
        self._safe = copy.deepcopy(self._now)
        kept = set(self._safe.names.values())
        self._safe.files = {number: file for number, file in self._safe.files.items() if number in kept}
        self._unsafe.clear()

    def crash(self) -> None:
        """The machine lost power."""
        dice = self._schedule.dice
        prefix = dice.random() < 0.7
        journal_end = self._schedule.between(0, len(self._unsafe))
        data_odds = dice.choice((0.0, 0.5, 0.9, 1.0))
        for at, operation in enumerate(self._unsafe):
            if operation.synced:
                self._safe.apply(operation)
            elif operation.kind == "write":
                if dice.random() < data_odds:
                    self._tear(operation)
            elif at < journal_end if prefix else dice.random() < 0.5:
                self._safe.apply(operation)
        self._unsafe.clear()
        self._now = copy.deepcopy(self._safe)

    def _tear(self, operation: _Operation) -> None:
        """Write it, or only some of its sectors."""
        dice = self._schedule.dice
        whole = dice.random() < 0.6
        for start in range(0, len(operation.data), SECTOR_BYTES):
            if whole or dice.random() < 0.5:
                part = operation.data[start : start + SECTOR_BYTES]
                self._safe.apply(_Operation("write", operation.number, offset=operation.offset + start, data=part))

    def rot(self, path: str) -> None:
        """One byte of a file changes by itself, silently."""
        number = self._now.names[path]
        for state in (self._safe, self._now):
            file = state.files.get(number)
            if file and file.data:
                at = self._schedule.between(0, len(file.data) - 1)
                file.data[at] ^= 1 << self._schedule.between(0, 7)
