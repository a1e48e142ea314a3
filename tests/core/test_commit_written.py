"""Writes, deletes and ends of flushes with two indexes, cut at every effect, on a disk that loses what it may."""

import copy

import pytest

from forebay.core.machines import commit, recover
from forebay.core.machines.commit import StoredVersion
from forebay.sim.disk import SimDisk
from forebay.sim.schedule import Schedule
from forebay.sim.store import SimStore, Subject, decode_header, encode_header

NAME = ("corpus", "a/key")
OLD, NEW = bytes(range(1, 201)), bytes(range(201, 1, -1))
WRITES = [(0, 50), (50, 100), (150, 50)]


class Shown(SimStore):
    """What is read is the visible index; the durable one is put into view at the start, as `judge_owed` says."""

    def __init__(self, seed):
        schedule = Schedule(seed)
        super().__init__(schedule, SimDisk(schedule))
        self.owned = set()  # object ids whose visible record is dirty
        self.notes = set()  # names with a tombstone or a dirty record, in the visible index alone
        self.tombstones = set()  # in the durable index
        self.lost = []
        self.acknowledged = False

    def do(self, plan, data=b"", version="", *, owned=False, done=None):
        commit.check_plan(plan)
        subject = Subject(version, len(data), data=data)
        for effect in plan[:done]:
            match effect:
                case commit.PutTombstone(durable=durable):
                    (self.tombstones if durable else self.notes).add(NAME)
                    self.durable.pop(NAME, None)
                case commit.Acknowledge():
                    self.acknowledged = True
                case commit.PutRecord(durable=durable):
                    self.perform(effect, subject)
                    if durable:
                        self.tombstones.discard(NAME)
                    else:
                        (self.owned.add if owned else self.owned.discard)(effect.object_id)
                        (self.notes.add if owned else self.notes.discard)(NAME)
                case _:
                    self.perform(effect, subject)

    def stop(self, machine):
        super().stop(machine)
        if machine:
            self.owned.clear()
            self.notes.clear()

    def seen(self, record):
        if record is None:
            return None
        path = record.path
        owned = record.object_id in self.owned
        return recover.RecordSeen(*record.name, record.object_id, path, record.size_bytes, owned)

    def start(self, trusted):
        self.restore()
        for record in list(self.clean.values()):
            if record.object_id in self.owned and record.name not in self.notes | set(self.durable):
                del self.clean[record.name]  # what replaces it was about to be shown
        for path in self.disk.list():
            self.judge(path, trusted)
        self.restore()  # a file that came back may be what a tombstone is about
        for name, record in list(self.clean.items()):
            if recover.judge_record(self.seen(record), self.disk.exists(record.path)):
                del self.clean[name]

    def restore(self):
        for name, record in list(self.durable.items()):
            owed = recover.RecordSeen(*name, record.object_id, record.path, record.size_bytes, True)
            there = self.disk.exists(record.path)
            size = len(self.disk.open(record.path).data) if record.path and there else None
            for action in recover.judge_owed(owed, self.seen(self.clean.get(name)), False, size):
                self.put_in_view(action)
        for name in self.tombstones:
            tombstone = recover.RecordSeen(*name, 0, "", 0, True)
            for action in recover.judge_owed(tombstone, self.seen(self.clean.get(name)), False, None):
                self.put_in_view(action)

    def put_in_view(self, action):
        match action:
            case recover.Restore(seen):
                name = (seen.bucket, seen.key)
                self.clean[name] = copy.copy(self.durable[name])
                self.owned.add(seen.object_id)
            case recover.Settle(seen):
                self.durable.pop((seen.bucket, seen.key), None)
                self.tombstones.discard((seen.bucket, seen.key))
            case recover.DropRecord(bucket, key, lost=lost):
                self.lost += [key] if lost else []
                self.clean.pop((bucket, key), None) if not lost else None

    def judge(self, path, trusted):
        file = self.disk.open(path)
        header, identity = decode_header(file.attributes.get("header")), None
        if header is not None:
            (bucket, key), object_id, _, size_bytes, owned = header
            identity = recover.Identity(bucket, key, object_id, size_bytes, (0, 1, 2, 3), owned)
        kind = "temp" if path.startswith("tmp/") else "data"
        seen = recover.FileSeen(path, kind, len(file.data), identity)
        now = self.clean.get(NAME)
        for action in recover.judge_file(seen, self.seen(now), trusted):
            match action:
                case recover.Delete(doomed) | recover.Quarantine(doomed):
                    self.disk.unlink(doomed)
                case recover.DropRecord():
                    self.clean.pop(NAME, None)
                case recover.Rebuild():
                    self._apply(action, {path: header})

    def served(self):
        """(version, bytes) or None."""
        record = self.clean.get(NAME)
        if record is None:
            return None
        if record.inline is not None:
            return record.version, record.inline
        return record.version, bytes(self.disk.open(record.path).data)


def place(object_id, durable, small=False):
    return StoredVersion(*NAME, object_id, "" if small else f"data/{object_id}", durable)


def put_plan(new, data, version, replaces=None, *, owned=True):
    header = encode_header(NAME, new.object_id, version, len(data), durable=owned)
    return commit.plan_put(new, f"tmp/{new.object_id}", WRITES, 4, header, replaces)


def with_old(store, old):
    """The key has an older object: its place."""
    if old == "nothing":
        return None
    durable, owned = old in ("durable", "small"), old != "clean"
    at = place(1, durable, small=old == "small")
    data = OLD[:16] if old == "small" else OLD
    store.do(put_plan(at, data, "old", owned=owned), data, "old", owned=owned)
    store.disk.settle()
    store.acknowledged = False
    return at


def cuts(before, make, machine_stops=10):
    """Every world: (store after its restart, how many effects were done, whether the machine stopped)."""
    steps = len(make(with_old(Shown(0), before))[0])
    for done in range(steps + 1):
        for crash in range(machine_stops + 1):
            store = Shown(done * 100 + crash)
            plan, data, version, owned = make(with_old(store, before))
            store.do(plan, data, version, owned=owned, done=done)
            store.stop(machine=crash > 0)
            store.start(trusted=crash == 0)
            assert not [path for path in store.disk.list() if path.startswith("tmp/")]
            served = store.served()
            store.start(trusted=True)  # and its sweep
            assert store.served() == served, "judging again changes nothing"
            assert set(store.disk.list()) <= {record.path for record in store.clean.values()}, "an orphan is left"
            yield store, done, crash > 0


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("before", ["nothing", "clean", "memory", "durable", "small"])
def test_a_write_is_whole_old_or_whole_new(before, durable):
    durable = durable or before in ("durable", "small")  # what replaces durable bytes is durable

    def make(old):
        return put_plan(place(2, durable), NEW, "new", old), NEW, "new", True

    outcomes = set()
    for store, _, machine in cuts(before, make):
        served = store.served()
        old = (OLD[:16] if before == "small" else OLD) if before != "nothing" else None
        unsure = machine and (before in ("clean", "memory") or not durable)  # promised to outlive processes only
        if served is None:
            assert before == "nothing" or unsure
        elif served[0] == "old":
            assert served[1] == old or (before == "clean" and machine)
        else:
            assert served == ("new", NEW)
        if store.acknowledged and not (machine and not durable):
            assert served == ("new", NEW)
        assert store.lost == []
        outcomes.add(served[0] if served else "absent")
    assert "new" in outcomes


@pytest.mark.parametrize("tombstone", [True, False])
@pytest.mark.parametrize("before", ["clean", "memory", "durable", "small"])
def test_a_delete_is_done_or_not(before, tombstone):
    def make(old):
        return commit.plan_delete(old, tombstone=tombstone, durable=tombstone), b"", "", False

    for store, done, machine in cuts(before, make):
        served = store.served()
        if store.acknowledged:
            through = machine and not tombstone  # a clean file that comes back is asked about before it is served
            assert served is None or (through and before == "clean")
            assert (NAME in store.tombstones) == tombstone
        if not done:
            assert served is not None or (machine and before == "memory")
        assert store.lost == []


@pytest.mark.parametrize("before", ["memory", "durable", "small"])
def test_the_end_of_a_flush_never_loses_the_bytes(before):
    def make(old):
        header = encode_header(NAME, 1, "backend", len(OLD), durable=False)
        data = OLD[:16] if before == "small" else OLD
        return commit.plan_flushed(old, 4, header), data, "backend", False

    for store, done, machine in cuts(before, make):
        served = store.served()
        if before == "durable" and (store.durable or not machine):
            assert served is not None
            assert served[1] == OLD
        elif not machine:
            assert served is not None
        if done == len(make(place(1, before != "memory"))[0]) and not machine:
            assert 1 not in store.owned
            assert store.durable == {}
        assert store.lost == []


def test_the_checker_refuses_each_wrong_order():
    durable = put_plan(place(2, True), NEW, "new", place(1, True))
    commit.check_plan(durable)
    for kind, to in [
        (commit.SyncFile, 4),
        (commit.SyncDir, 5),
        (commit.SetHeader, len(durable) - 1),
        (commit.Acknowledge, 0),
        (commit.Unlink, 0),
        (commit.Announce, 0),
    ]:
        plan = list(durable)
        at = next(at for at, effect in enumerate(plan) if isinstance(effect, kind))
        plan.insert(to, plan.pop(at))
        with pytest.raises(AssertionError):
            commit.check_plan(plan)
    with pytest.raises(AssertionError):
        commit.check_plan(
            [effect for effect in durable if not (isinstance(effect, commit.PutRecord) and effect.durable)]
        )
