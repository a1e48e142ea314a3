"""A node that writes back, in the simulator: the shells around the plans of writing, group commit, and the flush queue.

Theory. A write is a plan (`core.machines.commit`) in three parts: files, the durable index, what readers see. Changes
that wait while a group is being made durable go out together in the next: their files are made one effect at a time,
then all their durable records in one transaction, then all they show. A pause stands before every effect and
transaction, in which anything may happen, a stop of the process or the machine included.

What is owed is flushed as `core.machines.flush` says, conditional on what the backend had before. An answer may be lost
after the backend acted, or the request may land much later; then what the backend has is recognised by its digest, as
`core.machines.sent_bodies` says: what left is known in memory, and a note that is found at a start may have left. A
flush that finds somebody else's object puts ours beside it, and gives the key up to the other.

The visible index is a set of dicts that a process stop keeps and a machine stop loses; the durable one survives both.

Invariants, checked as they go (`sim/writing.py` judges the rest). (1) One change of a key at a time. (2) A plan keeps
the commit order (`check_plan`). (3) The queue owes exactly what the notes say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from forebay.core.errors import ForebayError, NotFound, Precondition
from forebay.core.machines import commit, flush, recover, sent_bodies
from forebay.core.machines.recover import RecordSeen
from forebay.core.machines.sent_bodies import Sent
from forebay.sim.backend import LATE_S, Name, SimBackend
from forebay.sim.disk import DiskFull, SimDisk
from forebay.sim.schedule import Schedule
from forebay.sim.store import INLINE_BYTES_MAX, blocks_of, decode_header, encode_header, sum_of

BUCKETS = {"back": True, "hasty": False, "shared": True}  # bucket: whether its writes are durable
UNANSWERED_MAX = 3  # so few that it happens


def show(name: Name) -> str:
    return f"{name[0]}/{name[1]}"


def digest_of(data: bytes) -> str:
    return f"{sum_of(data):016x}"


@dataclass(frozen=True, slots=True)
class Owed:
    """A note with its record: what a flush must know after a restart. `object_id` 0: a delete."""

    seq: int
    since_us: int
    object_id: int
    path: str
    data: bytes
    based_on: str | None  # the backend's version before the first of these writes; "" for none, None for any
    sent: Sent = Sent()  # of changes before it  # noqa: RUF009

    @property
    def digest(self) -> str:
        return digest_of(self.data) if self.object_id else sent_bodies.ABSENT


@dataclass(slots=True)
class Kept:
    """A visible record. `version` is the backend's once it has the object."""

    object_id: int
    path: str
    version: str
    data: bytes  # inline, or what the file should hold
    owned: bool


@dataclass(slots=True)
class Change:
    """A write (`data`) or delete (None) on its way, and whom to tell."""

    name: Name
    data: bytes | None
    done: Callable[[bool], None]
    plan: list[commit.Effect] = field(default_factory=list)
    owed: Owed | None = None  # None: nothing is owed afterwards (a flush that gave up)
    failed: bool = False


def parts_of(plan: list[commit.Effect]) -> tuple[list[commit.Effect], list[commit.Effect], list[commit.Effect]]:
    """A plan's effects on files before its records, on the durable index, and the rest."""
    marks = commit.PutRecord | commit.RemoveRecord | commit.PutTombstone
    at = next((n for n, effect in enumerate(plan) if isinstance(effect, marks)), len(plan))
    upto = at
    while upto < len(plan) and getattr(plan[upto], "durable", False) and isinstance(plan[upto], marks):
        upto += 1
    return plan[:at], plan[at:upto], plan[upto:]


class OwingNode:
    """One engine that writes, with its volume."""

    def __init__(self, schedule: Schedule, disk: SimDisk, backend: SimBackend) -> None:
        self.schedule, self.disk, self.backend = schedule, disk, backend
        self.visible: dict[Name, Kept] = {}
        self.notes: dict[Name, Owed] = {}
        self.settled: dict[Name, int] = {}
        self.durable: dict[Name, Owed] = {}
        self.lost: list[Name] = []
        self.pause_us = 150
        self.incarnation = 0
        self.next_id = self.next_seq = 1
        self.syncs = self.commits = self.conflicts = 0
        self.up = True
        self._forget()

    def _forget(self) -> None:
        self.waiting: deque[Change] = deque()
        self.group: list[Change] = []
        self.left: set[int] = set()  # of notes (by their `seq`): a request with it may have left
        self.repeated: set[int] = set()  # more than one
        self.late: dict[Name, Sent] = {}  # of what owes nothing
        self.queues = {bucket: flush.Queue(flushes_max=2) for bucket in BUCKETS}

    def _log(self, event: str, name: Name | None, detail: str = "") -> None:
        self.schedule.log("node", event, show(name) if name else "-", detail)

    def _later(self, delay_us: int, what: Callable[[], None]) -> None:
        incarnation = self.incarnation
        self.schedule.after(delay_us, lambda: what() if incarnation == self.incarnation else None)

    # --- what people ask ---------------------------------------------------------------------------------------------
    def change(self, name: Name, data: bytes | None, done: Callable[[bool], None]) -> None:
        """PUT or DELETE; `done(True)` is the acknowledgement, and may never come if the node stops."""
        if not self.up:
            done(False)
            return
        self.waiting.append(Change(name, data, done))
        self._next_group()

    def read(self, name: Name) -> bytes | None:
        """What a reader is given now; None: there is no such object."""
        kept = self.visible.get(name)
        if kept is not None:
            body = bytes(self.disk.open(kept.path).data) if kept.path else kept.data
            assert body == kept.data, f"the file of {show(name)} does not hold what was written"
            return body
        return None if name in self.notes else self.backend.present(name)[1]

    # --- group commit ------------------------------------------------------------------------------------------------
    def _next_group(self) -> None:
        if self.group or not self.waiting:
            return
        taken: set[Name] = set()
        rest: deque[Change] = deque()
        while self.waiting:
            change = self.waiting.popleft()
            (rest if change.name in taken else self.group).append(change)
            taken.add(change.name)
        self.waiting = rest
        self.commits += len(self.group)
        for change in self.group:
            self._plan(change)
        files = [(change, effect) for change in self.group for effect in parts_of(change.plan)[0]]
        self._each(deque(files), self._make_durable)

    def _plan(self, change: Change) -> None:
        name, data = change.name, change.data
        old, before = self.visible.get(name), self.notes.get(name)
        place = commit.StoredVersion(*name, old.object_id, old.path, name in self.durable) if old else None
        durable = BUCKETS[name[0]]
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        based_on = before.based_on if before else (old.version if old else self._base(name))
        if before:
            sent = sent_bodies.left(before.sent, before.digest)
        else:
            sent = self.late.get(name, Sent())
            if old:  # a request of a flush that is over may still arrive, and bring this back
                sent = sent_bodies.left(sent, digest_of(old.data))
        since_us = before.since_us if before else self.schedule.now_us
        if data is None:
            change.owed = Owed(seq, since_us, 0, "", b"", based_on, sent)
            place = place or commit.StoredVersion(*name, 0, "", name in self.durable)
            change.plan = commit.plan_delete(place, tombstone=True, durable=durable)
        else:
            object_id, self.next_id = self.next_id, self.next_id + 1
            path = f"data/{object_id}" if len(data) > INLINE_BYTES_MAX else ""
            change.owed = Owed(seq, since_us, object_id, path, data, based_on, sent)
            new = commit.StoredVersion(*name, object_id, path, durable)
            half = len(data) // 2
            writes = [(0, half), (half, len(data) - half)]
            header = encode_header(name, object_id, f"w{seq}", len(data), durable=True)
            if place is None and name in self.durable:  # a tombstone: the index that names the key goes first
                place = commit.StoredVersion(*name, 0, "", True)
            change.plan = commit.plan_put(new, f"tmp/{object_id}", writes, blocks_of(len(data)), header, place)
        commit.check_plan(change.plan)

    def _base(self, name: Name) -> str | None:
        """What the backend has of a key that is not here: known in this world, as after a HEAD."""
        return self.backend.present(name)[0]

    def _each(self, steps: deque[tuple[Change, commit.Effect]], then: Callable[[], None]) -> None:
        """Perform one effect after the other, a pause before each; a full disk ends its change alone."""

        def step() -> None:
            while steps and steps[0][0].failed:
                steps.popleft()
            if not steps:
                then()
                return
            change, effect = steps.popleft()
            try:
                self._file_effect(change, effect)
            except DiskFull:
                change.failed = True
                self._log("full", change.name)
                self.disk.unlink(f"tmp/{change.owed.object_id}" if change.owed else "")
                self.disk.unlink(change.owed.path if change.owed else "")
            self._later(self.schedule.delay_us(self.pause_us), step)

        self._later(self.schedule.delay_us(self.pause_us), step)

    def _file_effect(self, change: Change, effect: commit.Effect) -> None:
        disk, data = self.disk, change.data or b""
        match effect:
            case commit.CreateTemp(path, size_bytes):
                disk.create(path, size_bytes)
            case commit.WriteBytes(path, offset, length):
                disk.write(disk.open(path), offset, data[offset : offset + length])
            case commit.KeepSums(path, blocks):
                disk.set_attribute(path, "sums", repr(list(blocks)).encode())
            case commit.SetHeader(path, header):
                if disk.exists(path):
                    disk.set_attribute(path, "header", header)
            case commit.SyncFile(path):
                disk.sync_file(path)
            case commit.SyncDir(path):
                disk.sync_directory(path)
            case commit.Rename(source, target):
                disk.rename(source, target)
            case commit.Unlink(path):
                disk.unlink(path)
            case commit.Announce():
                pass
            case _:
                raise TypeError(effect)

    def _make_durable(self) -> None:
        """One transaction for all of the group: it is there whole, or not at all."""
        effects = [(c, effect) for c in self.group if not c.failed for effect in parts_of(c.plan)[1]]
        for change, effect in effects:
            match effect:
                case commit.RemoveRecord():
                    self.durable.pop(change.name, None)
                case _:
                    assert change.owed is not None
                    self.durable[change.name] = change.owed
        if effects:
            self.syncs += 1
            self._log("sync", None, f"changes={len({id(change) for change, _ in effects})}")
        self._later(self.schedule.delay_us(self.pause_us), self._show)

    def _show(self) -> None:
        """What readers see from now on; then the writers are told, then what was replaced goes."""
        group = [change for change in self.group if not change.failed]
        for change in group:
            owed, name = change.owed, change.name
            if owed is None:
                self.visible.pop(name, None)
                self.notes.pop(name, None)
            elif owed.object_id:
                self.visible[name] = Kept(owed.object_id, owed.path, "", owed.data, owned=True)
            else:
                self.visible.pop(name, None)
            if owed is not None:
                before = self.notes.get(name)
                never_left = before is not None and before.seq not in self.left
                self.notes[name] = replace(owed, sent=before.sent) if before and never_left else owed
            self.settled.pop(name, None)
        for change in self.group:
            change.done(not change.failed)
            if change.owed is not None and not change.failed:
                wrote = flush.Wrote(change.name[1], change.owed.seq, len(change.owed.data), change.owed.since_us / 1e6)
                self._queue(change.name[0], wrote)
        later = commit.Announce | commit.Unlink
        rest = [(c, effect) for c in group for effect in parts_of(c.plan)[2] if isinstance(effect, later)]
        self._each(deque(rest), self._group_over)

    def _group_over(self) -> None:
        self.group = []
        self._next_group()

    # --- flushing ----------------------------------------------------------------------------------------------------
    def _queue(self, bucket: str, event: flush.Event) -> None:
        queue = self.queues[bucket]
        effects = queue.step(self.schedule.now_s, event)
        queue.check()
        for effect in effects:
            match effect:
                case flush.Start(key, _):
                    self._later(0, lambda key=key: self._flush((bucket, key)))  # type: ignore[misc]
                case flush.Wake(at_s):
                    delay_us = max(1, int((at_s - self.schedule.now_s) * 1e6) + 1)
                    self._later(delay_us, lambda: self._queue(bucket, flush.Woke()))

    def _flush(self, name: Name) -> None:
        owed = self.notes.get(name)
        if owed is None:
            self._queue(name[0], flush.Dropped(name[1]))
            return
        self._log("flush", name, f"seq={owed.seq} {'delete' if not owed.object_id else ''}")
        expect = owed.based_on or ""
        if sent_bodies.asks_first(owed.sent, owed.digest, UNANSWERED_MAX):
            self._log("ask", name, f"seq={owed.seq}")
            self._look(name, owed, expect)
        else:
            self._send(name, owed, expect)

    def _send(self, name: Name, owed: Owed, expect: str) -> None:
        now, before = self.notes.get(name), owed.seq in self.left
        if not before and (now is None or now.seq != owed.seq):  # nothing names it any more: it must not leave
            self._queue(name[0], flush.Dropped(name[1]))
            return
        data, incarnation = owed.data if owed.object_id else None, self.incarnation
        began_s = self.schedule.now_s
        self.left.add(owed.seq)
        self.repeated |= {owed.seq} if before else set()

        def done(version: str) -> None:
            if incarnation == self.incarnation:
                self._flushed(name, owed, version, began_s)

        def failed(error: ForebayError) -> None:
            if incarnation != self.incarnation:
                return
            if isinstance(error, Precondition):
                if not before:
                    self.left.discard(owed.seq)  # it was heard that it did not
                self._look(name, owed, expect)
            else:
                self._flush_failed(name, error)

        self.backend.change(name, data, expect, done, failed)

    def _flush_failed(self, name: Name, error: ForebayError) -> None:
        draw = self.schedule.dice.random()
        self._queue(name[0], flush.Failed(name[1], draw, error.retry_after_s))

    def _look(self, name: Name, owed: Owed, expect: str) -> None:
        """The backend may have something else than we took it to have: perhaps our own, whose answer was lost."""
        incarnation, began_s = self.incarnation, self.schedule.now_s

        def known(version: str, data: bytes) -> None:
            if incarnation != self.incarnation:
                return
            digest = digest_of(data)
            if owed.based_on is None or version == expect:
                self._send(name, owed, version)
            elif owed.object_id and digest == owed.digest:
                self._flushed(name, owed, version, began_s)
            elif digest in owed.sent.digests:
                self._send(name, owed, version)
            else:
                self._conflict(name, owed)

        def failed(error: ForebayError) -> None:
            if incarnation != self.incarnation:
                return
            if not isinstance(error, NotFound):
                self._flush_failed(name, error)
            elif not owed.object_id:
                self._flushed(name, owed, "", began_s)
            elif owed.based_on is None or expect == "" or sent_bodies.ABSENT in owed.sent.digests:
                self._send(name, owed, "")
            else:
                self._conflict(name, owed)

        self.backend.look(name, known, failed)

    def _under_lock(self, name: Name, then: Callable[[], None]) -> None:
        """Do it when no change of the key is on its way through its plan."""
        if any(change.name == name for change in self.group):
            self._later(self.pause_us, lambda: self._under_lock(name, then))
        else:
            then()

    def _flushed(self, name: Name, owed: Owed, version: str, began_s: float) -> None:
        ended_s = self.schedule.now_s
        self._under_lock(name, lambda: self._settle(name, owed, version, began_s, ended_s))

    def _settle(self, name: Name, owed: Owed, version: str, began_s: float, ended_s: float) -> None:
        """The backend has this write. If it is still the last one, nothing is owed any more."""
        now = self.notes.get(name)
        if now is None or now.seq != owed.seq:
            since_s = None
            if now is not None:
                sent = sent_bodies.answered(now.sent, began_s, ended_s, LATE_S)
                self.notes[name] = replace(now, based_on=version, sent=sent)
                if name in self.durable and self.durable[name].seq == now.seq:
                    self.durable[name] = self.notes[name]
                since_s = now.since_us / 1e6
            self._queue(name[0], flush.Ended(name[1], owed.seq, since_s))
            return
        self._log("flushed", name, f"seq={owed.seq} {version}")
        kept_record = self.visible.get(name)
        del self.notes[name]
        sent = sent_bodies.left(owed.sent, owed.digest) if owed.seq in self.repeated else owed.sent
        self.late[name] = sent_bodies.answered(sent, began_s, ended_s, LATE_S)
        self.settled[name] = owed.seq
        if kept_record is not None:
            kept_record.owned, kept_record.version = False, version
            place = commit.StoredVersion(*name, kept_record.object_id, kept_record.path, name in self.durable)
            header = encode_header(name, kept_record.object_id, version, len(kept_record.data))
            plan = commit.plan_flushed(place, blocks_of(len(kept_record.data)), header)
            headers = [effect for effect in plan if isinstance(effect, commit.SetHeader)]
            self._each(deque((Change(name, None, lambda _: None), effect) for effect in headers), lambda: None)
        if self.schedule.happens(0.5):  # else the removal waits for another transaction, which may never come
            self._later(self.schedule.delay_us(3000), lambda: self._forget_settled(name, owed.seq))
        self._queue(name[0], flush.Ended(name[1], owed.seq))

    def _forget_settled(self, name: Name, seq: int) -> None:
        if name in self.durable and self.durable[name].seq == seq:
            del self.durable[name]

    def _conflict(self, name: Name, owed: Owed) -> None:
        """Somebody else wrote. Theirs stays; ours goes beside it, then we forget ours."""
        self.conflicts += 1
        self._log("conflict", name, f"seq={owed.seq}")
        if not owed.object_id:
            self._under_lock(name, lambda: self._give_up(name, owed))
            return
        beside = (name[0], f"{name[1]}.conflict-{owed.seq}-{self.conflicts}")
        incarnation = self.incarnation

        def done(_: str) -> None:
            if incarnation == self.incarnation:
                self._under_lock(name, lambda: self._give_up(name, owed))

        def failed(error: ForebayError) -> None:
            if incarnation == self.incarnation:
                self._flush_failed(name, error)

        self.backend.change(beside, owed.data, None, done, failed)

    def _give_up(self, name: Name, owed: Owed) -> None:
        """What the key holds is the backend's business again."""
        now = self.notes.get(name)
        if now is None or now.seq != owed.seq:
            if now is not None:  # written again meanwhile: that write knows what it replaces
                self.notes[name] = replace(now, based_on=None)
                if name in self.durable and self.durable[name].seq == now.seq:
                    self.durable[name] = self.notes[name]
            self._queue(name[0], flush.Ended(name[1], owed.seq, now.since_us / 1e6 if now else None))
            return
        kept = self.visible.pop(name, None)
        del self.notes[name]
        self._forget_settled(name, owed.seq)
        if kept is not None and kept.path:
            self.disk.unlink(kept.path)
        self._queue(name[0], flush.Ended(name[1], owed.seq))

    # --- stops -------------------------------------------------------------------------------------------------------
    def stop(self, machine: bool) -> None:
        """kill -9, or the power fails."""
        self.schedule.log("node", "crash", "-", "machine" if machine else "process")
        self.up = False
        self.incarnation += 1
        self.backend.hang_up()
        if machine:
            self.disk.crash()
            self.visible.clear()
            self.notes.clear()
            self.settled.clear()
        self._forget()

    def start(self, trusted: bool) -> None:
        """Put what is durable into view, judge the files, and owe again what is owed."""
        for name, owed in sorted(self.durable.items()):
            self._restore(name, owed)
        for path in self.disk.list():
            self._judge(path, trusted)
        for name, kept in sorted(self.visible.items()):
            if recover.judge_record(self._seen(name, kept), not kept.path or self.disk.exists(kept.path)):
                del self.visible[name]
        for name in [name for name, owed in self.notes.items() if owed.object_id and name not in self.visible]:
            del self.notes[name]
        self.next_seq = max([self.next_seq, *(owed.seq + 1 for owed in self.notes.values())])
        self.left = {owed.seq for owed in self.notes.values()}
        self.up = True
        self._log("start", None, f"trusted={trusted} owed={len(self.notes)} kept={len(self.visible)}")
        for name, owed in sorted(self.notes.items()):
            self._queue(name[0], flush.Wrote(name[1], owed.seq, len(owed.data), owed.since_us / 1e6))

    def _seen(self, name: Name, kept: Kept) -> RecordSeen:
        return RecordSeen(*name, kept.object_id, kept.path, len(kept.data), kept.owned)

    def _restore(self, name: Name, owed: Owed) -> None:
        now = self.visible.get(name)
        there = bool(owed.path) and self.disk.exists(owed.path)
        size_bytes = len(self.disk.open(owed.path).data) if there else None
        seen = RecordSeen(*name, owed.object_id, owed.path, len(owed.data), True)
        settled = self.settled.get(name) == owed.seq
        for action in recover.judge_owed(seen, self._seen(name, now) if now else None, settled, size_bytes):
            match action:
                case recover.Settle():
                    del self.durable[name]
                    return
                case recover.DropRecord(lost=True):
                    self.lost.append(name)
                case recover.DropRecord():
                    self.visible.pop(name, None)
                case recover.Restore():
                    self.visible[name] = Kept(owed.object_id, owed.path, "", owed.data, owned=True)
        if name not in self.lost:
            self.notes[name] = owed
            self.settled.pop(name, None)

    def _judge(self, path: str, trusted: bool) -> None:
        file = self.disk.open(path)
        header, identity, name, record = decode_header(file.attributes.get("header")), None, None, None
        if header is not None:
            name, object_id, _, size_bytes, durable = header
            identity = recover.Identity(*name, object_id, size_bytes, tuple(range(blocks_of(size_bytes))), durable)
            kept = self.visible.get(name)
            record = self._seen(name, kept) if kept else None
        kind = "temp" if path.startswith("tmp/") else "data"
        seen = recover.FileSeen(path, kind, len(file.data), identity)  # type: ignore[arg-type]
        for action in recover.judge_file(seen, record, trusted):
            match action:
                case recover.Delete(doomed) | recover.Quarantine(doomed):
                    self.disk.unlink(doomed)
                case recover.DropRecord(bucket, key, _, lost):
                    self.lost += [(bucket, key)] if lost else []
                    self.visible.pop((bucket, key), None)
                case recover.Rebuild(rebuilt, _):
                    self.disk.unlink(rebuilt)  # clean and unverified: this world fetches it from the backend instead

    def owing(self) -> Iterable[Name]:
        """Every key that is not in its backend as it is here."""
        return self.notes.keys()
