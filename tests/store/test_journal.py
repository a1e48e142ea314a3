"""The journal of the durable index: what was acknowledged is there after any stop, and nothing else is."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.core.errors import Corrupt
from forebay.node.store.disk import durable as durables
from forebay.node.store.disk import journal as journals
from forebay.node.store.disk.durable import Durable, Entry
from forebay.node.store.disk.journal import ALIGN_BYTES, Journal, pack
from forebay.node.store.disk.notes import Note

SEED = 77
HEADER_BYTES = 32
Told = dict[bytes, Entry | None]


def changes(number: int, size_bytes: int = 40) -> list[tuple[bytes, bytes | None]]:
    return [(b"key-%d" % number, random.Random(number).randbytes(size_bytes)), (b"gone-%d" % number, None)]


def written(directory: Path, count: int, *, heard: int = 0, size_bytes: int = 40) -> Journal:
    """A journal with `count` frames more."""
    journal = Journal(str(directory), SEED, heard)
    for number in range(count):
        body = pack(changes(number, size_bytes))
        assert journal.provides(len(body))
        journal.append(body)
    return journal


def found(directory: Path, heard: int = 0) -> list[Any]:
    journal = Journal(str(directory), SEED, heard)
    journal.close()
    return [changes for generation in journal.found for changes in generation]


@pytest.fixture(autouse=True)
def short_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several generations within a test."""
    monkeypatch.setattr(journals, "GENERATION_BYTES", 8 * ALIGN_BYTES)
    monkeypatch.setattr(journals, "PROVIDED_BYTES_MIN", 4 * ALIGN_BYTES)


# --- names -----------------------------------------------------------------------------------------------------------
class Cut(Exception):
    """The process ends here."""


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directories that were synced, in order."""
    found: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        real(fd)
        found.append(str(Path(f"/proc/self/fd/{fd}").readlink()))

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_a_journal_that_a_killed_process_made_gets_its_name_synced(tmp_path: Path, synced: list[str]) -> None:
    """The file was there, so its name was taken for synced: a stop of the machine took it, with acknowledged writes."""
    (tmp_path / "journal.1").touch()
    journal = written(tmp_path, 2)
    assert synced == [str(tmp_path)], "once for each file and process"
    journal.turn()
    assert journal.provides(10)
    assert synced == [str(tmp_path)] * 2
    journal.turn()
    assert journal.provides(10)
    assert synced == [str(tmp_path)] * 2
    journal.close()


def test_an_index_that_a_killed_process_made_gets_its_name_synced(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(path: str) -> None:
        raise Cut

    path = str(tmp_path / "durable")
    with monkeypatch.context() as patch:
        patch.setattr(durables, "sync_path", cut)
        with pytest.raises(Cut):
            Durable(path)
    assert not synced
    Durable(path).close()
    assert synced == [path, str(tmp_path)]
    Durable(path).close()
    assert synced == [path, str(tmp_path)], "it is known by now"


# --- files -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stale", [False, True], ids=["new", "recycled"])
def test_cut_at_each_byte_it_ends_with_the_last_whole_frame(tmp_path: Path, stale: bool) -> None:
    """Beyond the cut there is nothing, or what an older generation left in the file."""
    old = b""
    if stale:
        journal = written(tmp_path, 3, size_bytes=50)
        journal.turn()
        journal.turn()
        old = (tmp_path / "journal.1").read_bytes()
        for number in range(3):
            assert journal.provides(200)
            journal.append(pack(changes(number)))
        journal.close()
    else:
        written(tmp_path, 3).close()
    path, heard = tmp_path / "journal.1", 2 if stale else 0
    whole = path.read_bytes()
    bodies = [changes(number) for number in range(3)]
    ends = [number * ALIGN_BYTES + HEADER_BYTES + len(pack(body)) for number, body in enumerate(bodies)]
    places = {at for end in ends for at in range(max(0, end - 120), end + 3)} | set(range(0, len(whole), 509))
    for at in sorted(places):
        path.write_bytes(whole[:at] + old[at:])
        assert found(tmp_path, heard) == bodies[: sum(end <= at for end in ends)], at


def test_a_frame_that_is_damaged_among_others_is_an_error_and_not_an_end(tmp_path: Path) -> None:
    written(tmp_path, 3).close()
    path = tmp_path / "journal.1"
    whole = path.read_bytes()
    for at in [*range(HEADER_BYTES + len(pack(changes(0)))), *(ALIGN_BYTES + 5, ALIGN_BYTES + 40)]:
        damaged = bytearray(whole)
        damaged[at] ^= 0x40
        path.write_bytes(damaged)
        with pytest.raises(Corrupt, match="is damaged"):
            found(tmp_path)
    damaged = bytearray(whole)
    damaged[2 * ALIGN_BYTES + 40] ^= 1
    path.write_bytes(damaged)
    assert len(found(tmp_path)) == 2, "the last one could not be told from one that was torn"


def test_what_lmdb_has_heard_of_is_never_read_again(tmp_path: Path) -> None:
    journal = written(tmp_path, 5)
    journal.turn()
    for number in (7, 8):
        assert journal.provides(200)
        journal.append(pack(changes(number)))
    journal.close()
    first, second = [changes(number) for number in range(5)], [changes(7), changes(8)]
    assert found(tmp_path) == first + second
    assert found(tmp_path, heard=1) == second
    assert found(tmp_path, heard=2) == []
    journal = written(tmp_path, 1, heard=2)  # generation 3 over the five frames of generation 1
    assert journal.generation == 3
    journal.close()
    assert found(tmp_path, heard=2) == [changes(0)]
    assert found(tmp_path, heard=3) == []


def test_a_generation_that_is_missing_or_cut_before_the_next_is_an_error(tmp_path: Path) -> None:
    journal = written(tmp_path, 3)
    journal.turn()
    assert journal.provides(200)
    journal.append(pack(changes(9)))
    journal.close()
    path = tmp_path / "journal.1"
    whole = path.read_bytes()
    for kept in (0, 1, 2):
        path.write_bytes(whole[: kept * ALIGN_BYTES])
        with pytest.raises(Corrupt, match="is damaged"):
            found(tmp_path)
    path.write_bytes(whole[: 2 * ALIGN_BYTES] + whole[ALIGN_BYTES : 2 * ALIGN_BYTES])  # one twice, one not at all
    with pytest.raises(Corrupt, match="is damaged"):
        found(tmp_path)


def test_an_object_cannot_be_made_to_look_like_a_frame(tmp_path: Path) -> None:
    """Whoever writes objects knows the form of a frame, and can guess where a later generation ends over them."""
    forger = tmp_path / "forger"
    forger.mkdir()
    written(forger, 2, heard=2).close()
    forged = (forger / "journal.1").read_bytes()[ALIGN_BYTES : ALIGN_BYTES + 200]
    before = HEADER_BYTES + len(pack([(b"k", bytes(9000))])) - 9000
    journal = Journal(str(tmp_path), SEED + 1, 0)
    body = pack([(b"k", bytes(ALIGN_BYTES - before) + forged + bytes(5000))])
    assert journal.provides(len(body))
    journal.append(body)
    journal.turn()
    journal.turn()
    assert (tmp_path / "journal.1").read_bytes().index(forged) == ALIGN_BYTES
    assert journal.provides(200)
    journal.append(pack(changes(5)))
    journal.close()
    journal = Journal(str(tmp_path), SEED + 1, 2)
    assert (journal.found, journal.generation) == ([[changes(5)]], 4)


# --- the durable index -----------------------------------------------------------------------------------------------
class Keeper:
    """A durable index and what it was told, of a few keys."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.chance = random.Random(seed)
        self.seq = 0
        self.right: dict[bytes, Entry] = {}
        self.durable = Durable(str(path))

    def draw(self) -> Told:
        """The next changes."""
        drawn: Told = {}
        for _ in range(self.chance.choice((1, 1, 3, 9))):
            self.seq += 1
            note = Note(self.seq, 1.0, self.chance.randrange(900), self.seq, md5="m" * self.chance.randrange(6000))
            key = b"bucket\0%02d" % self.chance.randrange(40)
            drawn[key] = None if self.chance.random() < 0.3 else Entry(note)
        return drawn

    def apply(self, drawn: Told) -> None:
        for key, entry in drawn.items():
            if entry is None:
                self.right.pop(key, None)
            else:
                self.right[key] = entry

    def commit(self) -> None:
        drawn = self.draw()
        self.durable.commit(drawn)
        self.apply(drawn)

    def check(self) -> None:
        assert list(self.durable.walk(batch=7)) == sorted(self.right.items())


def test_looks_see_what_was_committed_whoever_has_it(tmp_path: Path) -> None:
    told = Keeper(tmp_path / "durable", 1)
    for turn in range(300):
        told.commit()
        key = b"bucket\0%02d" % told.chance.randrange(40)
        assert told.durable.get(key) == told.right.get(key)
        assert told.durable.has(key) == (key in told.right)
        start = b"bucket\0%02d" % told.chance.randrange(40)
        wanted = sorted((key, entry) for key, entry in told.right.items() if key >= start)
        assert list(told.durable.walk(start, batch=told.chance.choice((1, 7, 512)))) == wanted
        if turn % 50 == 49:
            told.durable.close()
            told.durable = Durable(str(told.path))
    assert told.durable._journal.generation > 30, "LMDB was fed many times"
    told.durable.close()


class PowerCut(BaseException):
    """The machine stops here."""


class Platter:
    """What a disk has of a durable index: of the journal what was synced, and any sectors of what was not; of LMDB the
    last transaction, which is synced whole."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch, chance: random.Random) -> None:
        self.path, self.chance = path, chance
        self.synced: dict[str, bytearray] = {}
        self.pending: list[tuple[str, int, bytes]] = []
        self.lmdb = b""
        self.cut = False
        real_write, real_sync, real_feed = os.pwrite, os.fdatasync, Durable._feed

        def pwrite(fd: int, data: bytes, offset: int) -> int:
            self.pending.append((self._name(fd), offset, bytes(data)))
            return real_write(fd, data, offset)

        def fdatasync(fd: int) -> None:
            if self.cut:
                raise PowerCut
            real_sync(fd)
            for name, offset, data in self.pending:
                self._put(name, offset, data)
            self.pending.clear()

        def feed(durable: Durable, layer: Any, generation: int) -> None:
            real_feed(durable, layer, generation)
            self.lmdb = (path / "data.mdb").read_bytes()

        patch.setattr(journals.os, "pwrite", pwrite)
        patch.setattr(journals.os, "fdatasync", fdatasync)
        patch.setattr(Durable, "_feed", feed)

    @staticmethod
    def _name(fd: int) -> str:
        return Path(f"/proc/self/fd/{fd}").readlink().name

    def _put(self, name: str, offset: int, data: bytes) -> None:
        image = self.synced.setdefault(name, bytearray())
        image.extend(bytes(max(0, offset + len(data) - len(image))))
        image[offset : offset + len(data)] = data

    def after_a_cut(self, directory: Path) -> None:
        """What a machine finds when it has power again."""
        share = self.chance.choice((0.0, 0.3, 0.9, 1.0))
        for name, offset, data in self.pending:
            for at in range(0, len(data), 512):
                if self.chance.random() < share:
                    self._put(name, offset + at, data[at : at + 512])
        directory.mkdir()
        (directory / "data.mdb").write_bytes(self.lmdb)
        for name, image in self.synced.items():
            (directory / name).write_bytes(image)


@pytest.mark.parametrize("seed", range(25))
def test_after_a_power_cut_every_acknowledged_change_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """And of the one under way all or nothing."""
    told = Keeper(tmp_path / "durable", seed)
    with monkeypatch.context() as patch:
        platter = Platter(told.path, patch, told.chance)
        platter.lmdb = (told.path / "data.mdb").read_bytes()
        for _ in range(told.chance.randrange(60)):
            told.commit()
        platter.cut = True
        drawn = told.draw()
        try:
            told.durable.commit(drawn)
        except PowerCut:
            pass
        if told.durable._feeder is not None:
            told.durable._feeder.join()
        platter.after_a_cut(tmp_path / "later")
    told.durable._env.close()
    told.durable = Durable(str(tmp_path / "later"))
    if dict(told.durable.walk()) != told.right:
        told.apply(drawn)
    told.check()
    for _ in range(20):
        told.commit()
    told.durable.close()
    told.durable = Durable(str(tmp_path / "later"))
    told.check()
    told.durable.close()


def test_a_start_that_dies_while_it_reads_the_journal_reads_it_again(tmp_path: Path) -> None:
    """LMDB may or may not have heard; and the journal as it was, beside an LMDB that has, changes nothing."""
    told = Keeper(tmp_path / "durable", 3)
    for _ in range(12):
        told.commit()
    told.durable._env.close()  # killed
    before = tmp_path / "before"
    shutil.copytree(told.path, before)
    for _ in range(3):
        told.durable = Durable(str(told.path))
        told.check()
        told.durable._env.close()
        for name in ("journal.0", "journal.1"):
            if (before / name).exists():
                shutil.copy(before / name, told.path / name)


def test_notes_and_settlements_see_what_is_in_the_journal(tmp_path: Path) -> None:
    durable = Durable(str(tmp_path / "durable"))
    note = Note(1, 1.0, 5, 7)
    durable.commit({b"a": Entry(note), b"b": Entry(note)})
    begun = msgspec.structs.replace(note, upload_id="up")
    assert durable.commit({}, {b"a": begun, b"b": msgspec.structs.replace(begun, seq=9)}) == {b"a"}
    durable.settle_later(b"b", 1)
    durable.settle_later(b"a", 8)
    durable.replace_later(b"a", Entry(note, None, 99))
    durable.commit({})
    assert sorted(durable.take_settled()) == [b"a", b"b"]
    assert dict(durable.walk()) == {b"a": Entry(begun, None, 99)}
    durable.close()


def test_an_index_of_format_1_goes_on(tmp_path: Path) -> None:
    """It has no journal, and its LMDB says nothing of one."""
    told = Keeper(tmp_path / "durable", 4)
    for _ in range(10):
        told.commit()
    told.durable.close()
    durable = Durable(str(told.path))
    with durable._env.begin(write=True) as txn:
        txn.drop(durable._about)
    durable._env.close()
    with pytest.raises(Corrupt, match="not the one that its journal belongs to"):
        Durable(str(told.path))
    for name in ("journal.0", "journal.1"):
        (told.path / name).unlink(missing_ok=True)
    told.durable = Durable(str(told.path))
    told.check()
    told.commit()
    told.durable.close()


# --- a disk without room ---------------------------------------------------------------------------------------------
def _refusing(monkeypatch: pytest.MonkeyPatch, error: int, *, tears: bool) -> Callable[[], None]:
    """From the call on the journal's file takes nothing, or half of a frame."""
    real, refusing = os.pwrite, False

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if not refusing or not any(data):
            return real(fd, data, offset)
        if tears:
            return real(fd, data[: len(data) // 2], offset)
        raise OSError(error, os.strerror(error))

    def begin() -> None:
        nonlocal refusing
        refusing = True

    monkeypatch.setattr(journals.os, "pwrite", pwrite)
    return begin


@pytest.mark.parametrize("tears", [False, True])
def test_a_journal_without_room_leaves_it_to_lmdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tears: bool) -> None:
    told = Keeper(tmp_path / "durable", 5)
    told.commit()
    _refusing(monkeypatch, errno.ENOSPC, tears=tears)()
    for _ in range(5):
        told.commit()
    told.check()
    told.durable._env.close()
    told.durable = Durable(str(told.path))
    told.check()
    told.durable.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_commit_that_fails_changes_nothing_now_and_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    told = Keeper(tmp_path / "durable", 6)
    told.commit()
    real, torn = os.fdatasync, []

    def fdatasync(fd: int) -> None:
        if not torn:
            torn.append(fd)
            raise OSError(error, os.strerror(error))
        real(fd)

    def feed(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(journals.os, "fdatasync", fdatasync)
        patch.setattr(Durable, "_feed", feed)
        with pytest.raises(OSError, match=os.strerror(error)):
            told.durable.commit(told.draw())
    told.check()
    told.durable._env.close()  # killed at once: the frame was whole in the file
    told.durable = Durable(str(told.path))
    told.check()
    told.commit()
    told.durable.close()


def test_a_disk_with_hardly_any_room_has_no_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "ROOM_TIMES", 1 << 40)
    told = Keeper(tmp_path / "durable", 7)
    for _ in range(10):
        told.commit()
    assert sum(path.stat().st_size for path in told.path.glob("journal.*")) == 0
    told.durable._env.close()
    told.durable = Durable(str(told.path))
    told.check()
    told.durable.close()


def test_a_feeding_that_was_refused_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB has no room for what the journal took: nothing is lost, and when there is room all goes on."""
    told = Keeper(tmp_path / "durable", 8)

    def feed(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Durable, "_feed", feed)
        refused = None
        while refused is None:
            try:
                told.commit()
            except OSError as error:
                refused = error
        assert refused.errno == errno.ENOSPC
        told.check()
    for _ in range(100):
        told.commit()
    told.check()
    told.durable.close()


@pytest.mark.parametrize("seed", range(12))
def test_a_start_without_room_has_what_is_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """LMDB cannot be told at the start either: all is seen, writes go on as before the stop, and so after the next."""
    told = Keeper(tmp_path / "durable", seed)
    feed = Durable._feed

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for _ in range(6):
        refuses = told.chance.random() < 0.7
        monkeypatch.setattr(Durable, "_feed", refuse if refuses else feed)
        for _ in range(told.chance.choice((0, 1, 5, 40))):
            drawn = told.draw()
            try:
                told.durable.commit(drawn)
            except OSError:
                assert refuses
                break
            told.apply(drawn)
        if told.durable._feeder is not None:
            told.durable._feeder.join()
        told.durable._env.close()  # killed
        monkeypatch.setattr(Durable, "_feed", refuse if told.chance.random() < 0.7 else feed)
        told.durable = Durable(str(told.path))
        told.check()
        for key, entry in told.right.items():
            assert told.durable.get(key) == entry
    monkeypatch.setattr(Durable, "_feed", feed)
    for _ in range(20):
        told.commit()
    told.check()
    told.durable.close()
    told.durable = Durable(str(told.path))
    told.check()
    told.durable.close()


# --- a process that is killed ----------------------------------------------------------------------------------------
WORKER = """
import sys
from forebay.node.store.disk import journal
journal.GENERATION_BYTES, journal.PROVIDED_BYTES_MIN = 32768, 16384
from forebay.node.store.disk.durable import Durable, Entry
from forebay.node.store.disk.notes import Note
durable, first = Durable(sys.argv[1]), int(sys.argv[2])
for number in range(first, first + 100000):
    key = b"k%03d" % (number % 200)
    durable.commit({key: Entry(Note(number, 1.0, number, number)) if number % 5 else None})
    print(number, flush=True)
"""


@pytest.fixture
def killed(tmp_path: Path) -> Callable[[int, int], list[int]]:
    """Run the worker from a number on until it has acknowledged so many, kill it, and tell what it acknowledged."""

    def run(first: int, count: int) -> list[int]:
        command = [sys.executable, "-c", WORKER, str(tmp_path / "durable"), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(count)]
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.readlines()
        return [int(line) for line in lines if line.endswith("\n")]

    return run


def test_what_a_killed_process_acknowledged_is_there(tmp_path: Path, killed: Callable[[int, int], list[int]]) -> None:
    first, right = 1, {}
    for count in (3, 120, 61):
        acknowledged = killed(first, count)
        assert acknowledged == list(range(first, first + len(acknowledged)))
        first += len(acknowledged)
        right |= {b"k%03d" % (number % 200): number if number % 5 else 0 for number in acknowledged}
        durable = Durable(str(tmp_path / "durable"))
        there = {key: entry.note.seq for key, entry in durable.walk()}
        durable._env.close()
        wanted = {key: number for key, number in right.items() if number}
        more = b"k%03d" % (first % 200)  # the one under way may be there, too
        if there != wanted:
            there.pop(more, None)
            wanted.pop(more, None)
        assert there == wanted
