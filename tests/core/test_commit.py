"""Cut every plan at every effect, stop the process or the machine there, recover: whole-old, whole-new or absent."""

import copy

import pytest

from forebay.core.machines import commit, recover
from forebay.core.machines.commit import StoredVersion
from forebay.sim.disk import SimDisk
from forebay.sim.schedule import Schedule
from forebay.sim.store import BLOCK_BYTES, SimStore, Subject, encode_header, sum_of

NAME = ("corpus", "a/key")
OLD, NEW = bytes(range(1, 201)), bytes(range(201, 1, -1))  # 200 bytes: four blocks, the last one short
WRITES = [(0, 50), (50, 100), (150, 50)]


class Disk:
    """A store on a fresh disk, and plans for the one object in it."""

    def __init__(self, seed):
        self.schedule = Schedule(seed)
        self.store = SimStore(self.schedule, SimDisk(self.schedule))
        self.acknowledged = []

    def place(self, object_id, durable=False):
        return StoredVersion(*NAME, object_id, f"data/{object_id}", durable)

    def subject(self, data, version):
        return Subject(version, len(data), data=data, acknowledged=lambda: self.acknowledged.append(version))

    def clean(self, object_id, data, version, replaces=None):
        """Effects that bring a version in block by block, with what to hold meanwhile."""
        new, temp = self.place(object_id), f"tmp/{object_id}"
        effects = commit.plan_begin(new, temp, len(data), encode_header(NAME, object_id, version, len(data)))
        for block in range(4):
            start = block * BLOCK_BYTES
            writes = [(start, 32), (start + 32, min(32, len(data) - start - 32))] if block < 3 else [(start, 8)]
            effects += commit.plan_land(new, writes, [block], range(block), replaces if block == 0 else None)
        return [(effect, self.subject(data, version)) for effect in effects]

    def durable(self, object_id, data, version, replaces=None):
        header = encode_header(NAME, object_id, version, len(data), durable=True)
        plan = commit.plan_durable(self.place(object_id, True), f"tmp/{object_id}", WRITES, 4, header, replaces)
        return [(effect, self.subject(data, version)) for effect in plan]

    def perform(self, steps):
        for effect, subject in steps:
            self.store.perform(effect, subject)

    def served(self):
        """What a reader gets: (version, {block: bytes}), blocks verified where they are in doubt. None if absent."""
        record = self.store.lookup(NAME)
        if record is None:
            return None
        if record.inline is not None:
            return record.version, {0: record.inline}
        assert record.path in self.store.disk.list(), "a record without its file"
        good = {block for block in record.blocks if block not in record.unverified or self.store.matches(record, block)}
        file = self.store.disk.open(record.path)
        return record.version, {b: bytes(file.data[b * BLOCK_BYTES : (b + 1) * BLOCK_BYTES]) for b in sorted(good)}


def blocks(data):
    return {n: data[n * BLOCK_BYTES : (n + 1) * BLOCK_BYTES] for n in range(4)}


def cuts(build, crashes=12):
    """Every world in which the steps of `build(disk)` were cut: (disk, how many steps were performed, machine stop)."""
    steps = len(build(Disk(0)))
    for done in range(steps + 1):
        for crash in range(crashes + 1):
            disk = Disk(seed=done * 1000 + crash)
            disk.perform(build(disk)[:done])
            disk.store.stop(machine=crash > 0)
            disk.store.start(trusted=crash == 0)
            yield disk, done, crash > 0


def check_rubbish(disk):
    names = disk.store.disk.list()
    assert not [name for name in names if name.startswith("tmp/")], names
    assert set(names) <= {record.path for record in disk.store.records()}, "an orphan is left"
    again = disk.store.start(trusted=True)
    assert all(isinstance(action, recover.Keep) for action in again), "judging twice changes nothing"


def test_a_new_clean_object_is_absent_or_right_wherever_it_is_cut():
    whole = 0
    for disk, _, _ in cuts(lambda disk: disk.clean(1, NEW, "new")):
        served = disk.served()
        if served is not None:
            version, got = served
            assert version == "new"
            assert all(blocks(NEW)[block] == data for block, data in got.items())
            whole += len(got) == 4
        check_rubbish(disk)
    assert whole > 0


def test_a_replaced_version_is_whole_old_or_new_and_never_mixed():
    seen = set()

    def build(disk):
        disk.perform(disk.clean(1, OLD, "old"))
        disk.store.disk.settle()
        return disk.clean(2, NEW, "new", replaces=disk.place(1))

    for disk, _, machine in cuts(build):
        served = disk.served()
        assert served is not None or machine
        if served is not None:
            version, got = served
            seen.add((version, machine))
            assert all(blocks({"old": OLD, "new": NEW}[version])[block] == data for block, data in got.items())
            if version == "old":
                assert len(got) == 4 or machine, "nothing of the old version is lost before the new one is there"
        check_rubbish(disk)
    assert seen == {("old", False), ("new", False), ("old", True), ("new", True)}


def test_evicted_blocks_are_right_or_gone_never_holes():
    def build(disk):
        disk.perform(disk.clean(1, NEW, "new"))
        disk.store.disk.settle()
        disk.store.holes["data/1"] = {1, 2}
        plan = commit.plan_evict_blocks(disk.place(1), range(4), [1, 2], BLOCK_BYTES, len(NEW))
        return [(effect, disk.subject(NEW, "new")) for effect in plan]

    for disk, _, _ in cuts(build):
        _, got = disk.served()
        assert {0, 3} <= set(got), "the blocks that stay are never in danger"
        assert all(blocks(NEW)[block] == data for block, data in got.items())
        check_rubbish(disk)


def test_a_forgotten_object_is_whole_or_gone():
    def build(disk):
        disk.perform(disk.clean(1, NEW, "new"))
        disk.store.disk.settle()
        return [(effect, disk.subject(NEW, "new")) for effect in commit.plan_forget(disk.place(1))]

    for disk, done, machine in cuts(build):
        served = disk.served()
        assert served is None or served == ("new", blocks(NEW))
        assert (served is None) >= (done >= 1 and not machine)
        check_rubbish(disk)


def test_an_acknowledged_write_survives_every_cut_and_every_crash():
    def build(disk):
        disk.perform(disk.durable(1, OLD, "old"))
        disk.acknowledged.clear()
        return disk.durable(2, NEW, "new", replaces=disk.place(1, durable=True))

    outcomes = set()
    for disk, _, _ in cuts(build, crashes=25):
        version, got = disk.served()
        assert got == blocks({"old": OLD, "new": NEW}[version]), "whole, whichever it is"
        if disk.acknowledged:
            assert version == "new", "it was acknowledged"
        outcomes.add((version, bool(disk.acknowledged)))
        check_rubbish(disk)
    assert outcomes == {("old", False), ("new", False), ("new", True)}


def test_a_durable_write_that_was_cut_leaves_nothing_behind():
    outcomes = set()
    for disk, _, _ in cuts(lambda disk: disk.durable(1, NEW, "new")):
        record = disk.store.lookup(NAME)
        assert record is None or record.durable, "it must not come back as a clean object"
        outcomes.add((record is None, bool(disk.acknowledged)))
        check_rubbish(disk)
    assert outcomes == {(True, False), (False, False), (False, True)}


def test_a_durable_write_over_a_clean_copy_is_safe_too():
    def build(disk):
        disk.perform(disk.clean(1, OLD, "old"))
        disk.store.disk.settle()
        return disk.durable(2, NEW, "new", replaces=disk.place(1))

    for disk, _, _ in cuts(build):
        version, got = disk.served()
        assert got == blocks({"old": OLD, "new": NEW}[version])
        assert version == "new" or not disk.acknowledged
        check_rubbish(disk)


@pytest.mark.parametrize("size", [0, 1, 16])
def test_inline_objects_are_in_the_record_or_not_at_all(size):
    for disk, done, machine in cuts(
        lambda disk: [
            (effect, disk.subject(NEW[:size], "new"))
            for effect in commit.plan_inline(StoredVersion(*NAME, 1), replaces=disk.place(9))
        ]
    ):
        assert disk.served() == (None if machine or not done else ("new", {0: NEW[:size]}))


def test_a_flipped_byte_of_a_file_in_doubt_is_never_served():
    for seed in range(30):
        disk = Disk(seed)
        disk.perform(disk.clean(1, NEW, "new"))
        disk.store.disk.settle()
        disk.store.disk.rot("data/1")
        disk.store.stop(machine=True)
        disk.store.start(trusted=False)
        _, got = disk.served()
        assert len(got) == 3
        assert all(blocks(NEW)[block] == data for block, data in got.items())


# --- the checker of plans --------------------------------------------------------------------------------------------
def test_the_plan_checker_refuses_each_wrong_order():
    """Take a right plan, move one effect, and be refused."""
    new = StoredVersion(*NAME, 2, "data/2", True)
    durable = commit.plan_durable(new, "tmp/2", WRITES, 4, b"header", StoredVersion(*NAME, 1, "data/1", True))
    commit.check_plan(durable)

    def moved(plan, kind, to):
        plan = copy.copy(plan)
        at = next(at for at, effect in enumerate(plan) if isinstance(effect, kind))
        plan.insert(to, plan.pop(at))
        return plan

    last = len(durable) - 1
    for kind, to in [
        (commit.SetHeader, last),
        (commit.SyncFile, last),
        (commit.SyncFile, 1),
        (commit.SyncDir, last),
        (commit.Acknowledge, 0),
        (commit.Unlink, 0),
        (commit.KeepSums, last),
    ]:
        with pytest.raises(AssertionError):
            commit.check_plan(moved(durable, kind, to))
    evict = commit.plan_evict_blocks(new, range(4), [1], 64, 200)
    commit.check_plan(evict)
    with pytest.raises(AssertionError):
        commit.check_plan(moved(evict, commit.Punch, 0))
    with pytest.raises(AssertionError):
        commit.check_plan(moved(evict, commit.Announce, len(evict) - 1))


def test_evicting_every_block_forgets_the_object():
    place = StoredVersion(*NAME, 1, "data/1")
    assert commit.plan_evict_blocks(place, [0, 2], [2, 0], 64, 200) == commit.plan_forget(place)


def test_checksums_tell_versions_apart():
    assert all(sum_of(a) != sum_of(b) for a, b in zip(blocks(OLD).values(), blocks(NEW).values(), strict=True))
