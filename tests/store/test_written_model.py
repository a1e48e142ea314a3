"""Writes, deletes, flushes and landings against a dictionary, through process stops and machine stops."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.core.errors import ForebayError, Unavailable
from forebay.core.record import State
from tests.store import owned_objects as owning
from tests.store import store_objects as objects
from tests.store.owned_objects import Writer
from tests.store.store_objects import BUCKET, Bench

BLOCK = 4096
LARGE = 5 * BLOCK + 17
SMALL = 300
KEYS = ["a", "b", "ü", "k" * 600, "k" * 600 + "2"]
_keys = st.sampled_from(KEYS)
_sizes = st.sampled_from([SMALL, LARGE])

Seen = tuple[str, str]  # kind (absent, clean, dirty, local, deleted) and version
ABSENT: Seen = ("absent", "")


class OwnedAgainstDict(RuleBasedStateMachine):
    """`now`: what there is. `kept`: what a machine stop may leave of it; more than one while a note that was settled
    may or may not have left the durable index (`ghosts`: what it says)."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.bench = Bench([Path(self.directory.name) / "a", Path(self.directory.name) / "b"], block_bytes=BLOCK)
        self.writer = Writer(self.bench)
        self.now: dict[str, Seen] = dict.fromkeys(KEYS, ABSENT)
        self.kept: dict[str, set[Seen]] = {key: {ABSENT} for key in KEYS}
        self.ghosts: dict[str, Seen] = {}
        self.versions = 0

    def teardown(self) -> None:
        self.bench.close()
        self.directory.cleanup()

    def _version(self) -> str:
        self.versions += 1
        return f"v{self.versions}"

    def _is_owed(self, key: str) -> bool:
        return self.now[key][0] in ("dirty", "local", "deleted")

    def _entry(self, key: str) -> str:
        """Whether the durable index has an entry of the key: yes, no, maybe."""
        if key in self.ghosts:
            return "maybe"
        return "yes" if any(kind in ("dirty", "local", "deleted") for kind, _ in self.kept[key]) else "no"

    # --- changes ---

    @rule(
        keys=st.lists(_keys, min_size=1, max_size=3, unique=True),
        size_bytes=_sizes,
        durable=st.booleans(),
        kind=st.sampled_from(["dirty", "local", "clean", "deleted", "absent"]),
    )
    def change(self, keys: list[str], size_bytes: int, durable: bool, kind: str) -> None:
        """Some keys in one group, all alike."""
        store = self.bench.store
        seen: dict[str, Seen] = {}
        changes: list[owning.Change] = []
        for key in keys:
            version = self._version() if kind not in ("deleted", "absent") else ""
            seen[key] = (kind, version)
            if kind in ("deleted", "absent"):
                changes.append(self.writer.delete(key, note=kind == "deleted", durable=durable))
                continue
            state = {"dirty": State.DIRTY, "local": State.LOCAL, "clean": State.CLEAN}[kind]
            changes.append(self.writer.put(key, size_bytes, version, state, durable=durable and kind != "clean"))
        outcomes = owning.commit(store, changes)
        assert not any(isinstance(outcome, ForebayError) for outcome in outcomes)
        for key in keys:
            self._changed(key, seen[key], size_bytes, durable)

    def _changed(self, key: str, seen: Seen, size_bytes: int, durable: bool) -> None:
        entry = self._entry(key)
        if seen[0] in ("clean", "absent"):
            kept = {seen} if seen[0] == "absent" or size_bytes == LARGE else {ABSENT}
        elif durable or entry == "yes":
            kept = {seen}
        else:
            kept = {seen, ABSENT} if entry == "maybe" else {ABSENT}
        self.now[key], self.kept[key] = seen, kept
        self.ghosts.pop(key, None)
        if len(kept) > 1:
            self.ghosts[key] = seen

    @rule(key=_keys)
    def flushed(self, key: str) -> None:
        """The backend has heard of it."""
        store = self.bench.store
        kind, version = self.now[key]
        record = store.lookup(BUCKET, key)
        if kind == "deleted":
            assert store.mark_clean(BUCKET, key, 0, version="", checked_s=2.0) is None
            clean = ABSENT
        elif kind == "dirty":
            assert record is not None
            done = store.mark_clean(BUCKET, key, record.object_id, version=version, checked_s=2.0)
            assert done is not None
            clean = ("clean", version)
        else:
            object_id = record.object_id if record is not None else 1
            assert store.mark_clean(BUCKET, key, object_id, version="x", checked_s=2.0) is None
            return
        store.flush()
        self.now[key] = clean
        file = record is not None and record.inline is None
        before = self.kept[key]
        self.kept[key] = {clean if file or kind == "deleted" else ABSENT}
        if before != {ABSENT}:
            self.ghosts[key] = (kind, version)
            self.kept[key].add((kind, version))

    @rule()
    def settle(self) -> None:
        self.bench.store.settle()
        for key, ghost in self.ghosts.items():
            if self.now[key] != ghost:
                self.kept[key].discard(ghost)
        self.ghosts = {key: ghost for key, ghost in self.ghosts.items() if self.now[key] == ghost}

    @rule(key=_keys, size_bytes=_sizes)
    def land(self, key: str, size_bytes: int) -> None:
        store, version = self.bench.store, self._version()
        info, data = objects.make(key, size_bytes, version)
        try:
            if size_bytes == SMALL:
                store.put_inline(BUCKET, info, data, checked_s=1.0)
            else:
                objects.land(store, key, size_bytes, version)
        except Unavailable:
            assert self._is_owed(key)
            return
        assert not self._is_owed(key)
        store.flush()
        self.now[key] = ("clean", version)
        self._clean_is({("clean", version)} if size_bytes == LARGE else {ABSENT}, key)

    def _clean_is(self, outcomes: set[Seen], key: str) -> None:
        self.kept[key] = outcomes | ({self.ghosts[key]} if key in self.ghosts else set())

    @rule(key=_keys)
    def evict(self, key: str) -> None:
        store = self.bench.store
        record = store.lookup(BUCKET, key)
        if record is None:
            return
        gone = store.drop_units([(record.object_id, block) for block in range(8)])
        assert bool(gone) == (not self._is_owed(key))
        assert store.forget(BUCKET, key) is None or not self._is_owed(key)
        store.flush()
        if gone:
            self.now[key] = ABSENT
            self._clean_is({ABSENT}, key)

    @rule()
    def sweep(self) -> None:
        for _ in self.bench.store.sweep():
            pass
        self.bench.store.flush()
        self.bench.store.reclaim()
        self.bench.store.housekeep()

    # --- stops ---

    @rule(how=st.sampled_from(["clean", "closed", "killed"]))
    def process_stop(self, how: str) -> None:
        self.bench.store.flush()
        self.bench.store.reclaim()  # else a clean file of before may be found by a machine stop: it is asked about
        if how == "killed":
            kill(self.bench)
        else:
            self.bench.close(clean=how == "clean")
        self.bench.open()

    @rule(killed=st.booleans())
    def machine_stop(self, killed: bool) -> None:
        self.bench.store.flush()
        self.bench.store.reclaim()
        if killed:
            kill(self.bench)
        else:
            self.bench.close(clean=False)
        for directory in self.bench.dirs:
            mark = directory / "volume.json"
            mark.write_text(mark.read_text().replace('"boot_id": "', '"boot_id": "x'))
        self.bench.open()
        for key in KEYS:
            found = self._look(key)
            assert found in self.kept[key], key
            self.now[key], self.kept[key] = found, {found}
            self.ghosts.pop(key, None)

    # --- what must be ---

    def _look(self, key: str) -> Seen:
        record = self.bench.store.lookup(BUCKET, key)
        notes = {each.key: each.note for each in owning.notes_of(self.bench.store)}
        if record is None:
            return ("deleted", "") if key in notes else ABSENT
        kind = {0: "clean", State.DIRTY: "dirty", State.LOCAL: "local"}[State(record.state & State.OWNED)]
        assert (key in notes) == (kind == "dirty")
        return kind, record.version

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        assert {key: self._look(key) for key in KEYS} == self.now

    @invariant()
    def what_is_there_is_whole_and_right(self) -> None:
        for key in KEYS:
            record = self.bench.store.lookup(BUCKET, key)
            if record is None:
                continue
            data = objects.make(key, record.size_bytes, record.version)[1]
            assert owning.read(self.bench, key) == data
            blocks = range(6 if record.inline is None else 1)
            assert self.bench.store.check_blocks(record, BUCKET, key, blocks) == []

    @invariant()
    def what_is_owned_is_counted(self) -> None:
        owed = [key for key in KEYS if self.now[key][0] in ("dirty", "local")]
        sizes = [record.size_bytes for key in owed if (record := self.bench.store.lookup(BUCKET, key)) is not None]
        usage = self.bench.store.usage()
        assert sum(each.owned_objects for each in usage) == len(owed) == len(sizes)
        assert sum(each.owed_bytes for each in usage) == sum(sizes)
        assert all(each.owned_bytes >= each.owed_bytes for each in usage)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert "object-lost" not in self.bench.kinds()

    @precondition(lambda self: self.bench.store.pending == 0)
    @invariant()
    def no_temp_file_is_left(self) -> None:
        self.bench.settle()
        assert not [path for directory in self.bench.dirs for path in (directory / "tmp").iterdir()]


def kill(bench: Bench) -> None:
    """What a killed process leaves: pending removals are not committed, locks are let go."""
    for reader in bench.readers:
        reader.close()
    bench.readers.clear()
    for volume in bench.store._all:
        volume.index.discard()
        volume.index.close()
        volume.durable._env.close()
        os.close(volume._lock_fd)
    bench.store._closed = True


OwnedAgainstDict.TestCase.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


class TestOwnedAgainstDict(OwnedAgainstDict.TestCase):
    """Run by pytest under this name."""


def test_the_model_can_fail() -> None:
    """A store that lost an acknowledged write is told apart."""
    machine = OwnedAgainstDict()
    try:
        machine.change(["a"], LARGE, True, "dirty")
        (volume,) = [each for each in machine.bench.store.usable() if any(each.durable.walk())]
        volume.durable.commit({entry: None for entry, _ in volume.durable.walk()})
        with pytest.raises(AssertionError):
            machine.machine_stop(False)
    finally:
        machine.teardown()
