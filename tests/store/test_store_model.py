"""The store against a dictionary: random changes, flushes, restarts and machine stops."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.node.store.writer.landing import Landing
from forebay.node.store.writer.scrub import Scrubber
from tests.store import store_objects as objects
from tests.store.store_objects import Bench

BLOCK = 4096
SIZE = 4 * BLOCK + 100
KEYS = ["a", "a/b", "ü", "k" * 600, "k" * 600 + "2"]
VERSIONS = ["v1", "v2"]
_keys = st.sampled_from(KEYS)
_versions = st.sampled_from(VERSIONS)

Model = dict[str, tuple[str, frozenset[int] | None]]  # key -> version, blocks present (None: inline)


class StoreAgainstDict(RuleBasedStateMachine):
    """`now` is what the writer sees, `committed` what readers see."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.bench = Bench([Path(self.directory.name) / "a", Path(self.directory.name) / "b"], block_bytes=BLOCK)
        self.reader = self.bench.reader()
        self.now: Model = {}
        self.committed: Model = {}
        self.landings: dict[str, Landing] = {}
        self.doubted = False

    def teardown(self) -> None:
        self.bench.close()
        self.directory.cleanup()

    @rule(key=_keys, version=_versions, size_bytes=st.integers(0, 300))
    def put_inline(self, key: str, version: str, size_bytes: int) -> None:
        self.bench.store.put_inline(objects.BUCKET, *objects.make(key, size_bytes, version), checked_s=1.0)
        self._end(key)
        self.now[key] = (version, None)

    @rule(key=_keys, version=_versions)
    def begin(self, key: str, version: str) -> None:
        landing = self.bench.store.begin(objects.BUCKET, objects.make(key, SIZE, version)[0], checked_s=1.0)
        old = self.landings.get(key)
        if old is landing:
            landing.close()
            return
        self._end(key)
        self.landings[key] = landing

    @precondition(lambda self: self.landings)
    @rule(data=st.data(), block=st.integers(0, 4))
    def land(self, data: st.DataObject, block: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.landings)))
        landing = self.landings[key]
        objects.land_block(landing, objects.make(key, SIZE, landing.info.version)[1], block)
        if landing.gone:
            return
        version, blocks = self.now.get(key, ("", None))
        same = version == landing.info.version and blocks is not None
        self.now[key] = (landing.info.version, (blocks if same and blocks else frozenset()) | {block})

    @precondition(lambda self: self.landings)
    @rule(data=st.data(), block=st.integers(0, 4))
    def write_half_a_block(self, data: st.DataObject, block: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.landings)))
        landing = self.landings[key]
        start = block * BLOCK
        part = objects.make(key, SIZE, landing.info.version)[1][start : start + BLOCK]
        landing.write(start, part[: len(part) // 2])

    @precondition(lambda self: self.landings)
    @rule(data=st.data())
    def close_landing(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(sorted(self.landings))))

    def _end(self, key: str) -> None:
        if key in self.landings:
            self.landings.pop(key).close()

    @rule(key=_keys)
    def forget(self, key: str) -> None:
        assert (self.bench.store.forget(objects.BUCKET, key) is not None) == (key in self.now)
        self.now.pop(key, None)

    @rule(key=_keys, blocks=st.sets(st.integers(0, 6)))
    def drop(self, key: str, blocks: set[int]) -> None:
        record = self.bench.store.lookup(objects.BUCKET, key)
        if record is None or not blocks:
            return
        gone = self.bench.store.drop_units([(record.object_id, block) for block in blocks])
        version, present = self.now[key]
        left = present - blocks if present is not None else frozenset()
        assert (gone == [record.object_id]) == (not left)
        if left:
            self.now[key] = (version, left)
        else:
            del self.now[key]

    @rule()
    def flush(self) -> None:
        self.bench.store.flush()
        self.committed = dict(self.now)

    @rule()
    def reclaim(self) -> None:
        self.bench.store.reclaim()

    @rule()
    def sweep(self) -> None:
        for _ in self.bench.store.sweep():
            pass
        self.flush()

    @rule()
    def scrub(self) -> None:
        scrubber = Scrubber(self.bench.store)
        for _ in range(20):
            scrubber.step(0.0)
            scrubber._due_s = None
        assert scrubber.units_bad == 0

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        for key in list(self.landings):
            self._end(key)
        self.bench.close(clean=clean)
        self.bench.open()
        self.reader = self.bench.reader()
        self.committed = dict(self.now)

    @rule()
    def machine_stop(self) -> None:
        self.restart(clean=False)
        self.bench.close(clean=False)
        for directory in self.bench.dirs:
            mark = directory / "volume.json"
            mark.write_text(mark.read_text().replace('"boot_id": "', '"boot_id": "x'))
        self.bench.open()
        self.reader = self.bench.reader()
        # what was inline is lost with the index; the rest is found again
        self.now = {key: value for key, value in self.now.items() if value[1] is not None}
        self.committed = dict(self.now)

    @invariant()
    def writer_and_reader_see_their_worlds(self) -> None:
        for key in KEYS:
            for model, record in (
                (self.now, self.bench.store.lookup(objects.BUCKET, key)),
                (self.committed, self.reader.lookup(objects.BUCKET, key)),
            ):
                if key not in model:
                    assert record is None
                    continue
                version, blocks = model[key]
                assert record is not None
                assert record.version == version
                if blocks is None:
                    assert record.inline == objects.make(key, record.size_bytes, version)[1]
                else:
                    assert objects.present(record) == sorted(blocks)

    @invariant()
    def listed_blocks_hold_their_bytes(self) -> None:
        """On the disk, at any moment: those that the writer lists, and those that readers still see listed."""
        for model, lookup in ((self.now, self.bench.store.lookup), (self.committed, self.reader.lookup)):
            for key, (version, blocks) in model.items():
                if blocks is None:
                    continue
                record = lookup(objects.BUCKET, key)
                assert record is not None
                data = objects.make(key, SIZE, version)[1]
                path = next(
                    path for directory in self.bench.dirs for path in directory.rglob(f"{record.object_id:016x}")
                )
                stored = path.read_bytes()
                for block in blocks:
                    start = block * BLOCK
                    assert stored[start : start + BLOCK] == data[start : start + BLOCK], (key, version, block)

    @invariant()
    def listed_blocks_have_their_checksums(self) -> None:
        for key, (_, blocks) in self.now.items():
            record = self.bench.store.lookup(objects.BUCKET, key)
            assert record is not None
            assert self.bench.store.check_blocks(record, objects.BUCKET, key, sorted(blocks or ())) == []

    @invariant()
    def usage_is_what_is_there(self) -> None:
        total = 0
        for key, (_, blocks) in self.now.items():
            record = self.bench.store.lookup(objects.BUCKET, key)
            assert record is not None
            if blocks is None:
                total += record.size_bytes
            else:
                total += sum(min(SIZE, (block + 1) * BLOCK) - block * BLOCK for block in blocks)
        usage = self.bench.store.usage()
        assert sum(sum(each.buckets.values()) for each in usage) == total
        assert all(each.used_bytes >= sum(each.buckets.values()) for each in usage)
        assert sum(each.objects for each in usage) == len(self.now)

    @invariant()
    def listing_is_sorted_and_whole(self) -> None:
        listed = [entry.key for entry in self.reader.scan_entries(objects.BUCKET)]
        assert listed == sorted(self.committed, key=str.encode)


StoreAgainstDict.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


class TestStoreAgainstDict(StoreAgainstDict.TestCase):
    """Run by pytest under this name."""


def test_the_model_can_fail() -> None:
    """A store that forgets to flush is told apart from one that does."""
    machine = StoreAgainstDict()
    try:
        machine.put_inline("a", "v1", 10)
        machine.committed = dict(machine.now)
        with pytest.raises(AssertionError):
            machine.writer_and_reader_see_their_worlds()
    finally:
        machine.teardown()
