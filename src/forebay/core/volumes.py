"""Decides which volumes a node has, and what an absent volume may own.

Theory. Data that only this node has lies on its volumes, so an absent volume must not look like an empty one. The node
therefore remembers each volume outside of all volumes: its id, its path, its weight in placement, and the buckets in
which it may own something. A bucket is remembered before the first owned write to it on that volume is acknowledged. It
is forgotten when the volume was seen to owe nothing in it. In between, the memory is a superset of the truth. That is
all that safety needs, and it costs one write per bucket, not one per object.

An absent volume may own a key if it owes something in the key's bucket and the key belongs to it among *all* known
volumes, absent ones included: that is where the key was written. While a key's volume is absent and owes nothing in the
bucket, writes go to another volume. That volume then holds keys where placement would not look for them. It is
remembered to hold the bucket *astray*: when absent, it may own any key of the bucket.

`judge` compares the memory with what lies at each path, and gives each volume a verdict:

    present   its mark is there (at whatever path), or was lost and can be made again
    fresh     an order to make it, or the node's first start: nothing was ever here
    missing   the path is not there, is empty (nothing mounted), or is no longer among the node's volumes
    swapped   something else lies there: another volume, or other files
    emptied   its directory is there, and what it owed is not
    new       nobody ordered it: it is left alone until somebody does

Rejected: remembering every owned key (a second durable index, on the wrong disk); refusing to start (one disk of eight
would stop the node); a list of ids on the other volumes (a node with one volume has none).

Invariants. (1) Nothing is made or emptied at a path where a known volume lay. (2) Only `give up` forgets a volume that
owes something and is not present. (3) While an absent volume owes something, no other volume is taken in: placement
among the known volumes stays as it was when that volume was written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from forebay.core.placement import Members

State = Literal["present", "fresh", "missing", "swapped", "emptied", "new"]


class KnownVolume(msgspec.Struct, frozen=True, omit_defaults=True):
    """One volume as it is remembered. `volume_id` is its path where no id was ever learned, `weight` 0 where none was.

    `buckets` and `astray`: where it may own something, see the module's header. `owed_objects`, `owed_bytes`: how much
    that was at `seen_s` (Unix time); deletes that a backend has not heard of are in neither.
    """

    volume_id: str
    path: str
    weight: float = 0.0
    buckets: tuple[str, ...] = ()
    astray: tuple[str, ...] = ()
    owed_objects: int = 0
    owed_bytes: int = 0
    seen_s: float = 0.0

    @property
    def owes(self) -> bool:
        return bool(self.buckets or self.astray)

    def owes_in(self, bucket: str) -> bool:
        return bucket in self.buckets or bucket in self.astray


class Memory(msgspec.Struct, frozen=True):
    """All of it. `ordered`: paths at which a volume may be made, or one that was never here be taken in; `given_up`:
    ids that must not come back with what they owed; `epoch`: of the last session, with whatever volumes it was;
    `ids_below`: no session so far used this object id or a larger one; `doubted`: a volume that was away is back, and
    what it keeps for other nodes may be old, or a start that would have seen that was cut."""

    volumes: tuple[KnownVolume, ...] = ()
    ordered: tuple[str, ...] = ()
    given_up: tuple[str, ...] = ()
    epoch: int = 0
    ids_below: int = 0
    doubted: bool = False

    def find(self, name: str) -> KnownVolume | None:
        """By id or path."""
        return next((each for each in self.volumes if name in (each.volume_id, each.path)), None)

    def with_volume(self, volume: KnownVolume) -> Memory:
        """With this one in place of what was remembered of the same id, or of its path without an id."""
        kept = tuple(each for each in self.volumes if each.volume_id not in (volume.volume_id, volume.path))
        ordered = tuple(path for path in self.ordered if path != volume.path)
        return msgspec.structs.replace(self, volumes=(*kept, volume), ordered=ordered)


class VolumeState(msgspec.Struct, frozen=True):
    """A volume as the node shows it. `state`: ok; full (reads pass it by until eviction catches up); stalled
    (its disk does not answer: passed by until it does); failing or out (taken out, `reason` says why); or what `judge`
    calls one that is not in use. What it owned or owed at `owed_s` (Unix time) is in no backend; `change` says what to
    do about a volume that is not in use. When it is given up, `came_back` are the objects and deletes that other
    nodes kept of it and sent back since this node started, and `lost_buckets` those of which something may be lost."""

    volume_id: str
    path: str
    state: Literal["ok", "full", "stalled", "failing", "out", "missing", "swapped", "emptied", "new"] = "ok"
    capacity_bytes: int = 0
    used_bytes: int = 0
    objects: int = 0
    reason: str = ""
    owed_buckets: list[str] = []
    owed_objects: int = 0
    owed_bytes: int = 0
    owed_s: float = 0.0
    change: str = ""
    came_back: int = 0
    lost_buckets: list[str] = []


class LostObject(msgspec.Struct, frozen=True):
    """An object that was acknowledged, that no backend has, and whose bytes are gone: all, or half-open `ranges`."""

    bucket: str
    key: str
    size_bytes: int
    modified_s: float
    problem: str
    ranges: tuple[tuple[int, int], ...] = ()


class Seen(msgspec.Struct, frozen=True):
    """What lies at a path. `mark_id` and `weight` are of its mark ("" without one), `members` the ids it served with;
    `has_data` and `has_durable` say whether data files and a durable index are there, `leftovers` whether anything else
    of a volume is, and `foreign` names a file that no volume has."""

    path: str
    exists: bool = True
    mark_id: str = ""
    weight: float = 0.0
    members: tuple[str, ...] = ()
    has_data: bool = False
    has_durable: bool = False
    leftovers: bool = False
    foreign: str = ""

    @property
    def is_empty(self) -> bool:
        return not (self.mark_id or self.has_data or self.has_durable or self.leftovers or self.foreign)


class Standing(msgspec.Struct, frozen=True):
    """What a volume is at this start. `detail` says what was found, for people; `change` what to do about it. `weight`
    and `volume_id` are what a volume that lost its mark gets back."""

    volume_id: str
    path: str
    state: State
    detail: str = ""
    change: str = ""
    weight: float = 0.0


def first_memory(paths: Iterable[str]) -> Memory:
    """Of a node that starts for the first time: its volumes are made."""
    return Memory(ordered=tuple(paths))


def memory_of_marks(seen: Sequence[Seen], buckets: Iterable[str], now_s: float) -> Memory:
    """Of a node that ran before it remembered volumes: what the marks say, and the marks of those that are here about
    those that are not. What is not here may own anything in `buckets`."""
    astray = tuple(sorted(buckets))
    here = {each.mark_id for each in seen if each.mark_id}
    absent = sorted({member for each in seen for member in each.members} - here)
    unmarked = [each.path for each in seen if not each.mark_id and not each.has_data]
    known = [KnownVolume(each.mark_id, each.path, each.weight) for each in seen if each.mark_id]
    for volume_id in absent:
        known.append(KnownVolume(volume_id, unmarked.pop(0) if unmarked else ""))
    known += [KnownVolume(path, path) for path in unmarked]
    return Memory(tuple(msgspec.structs.replace(each, astray=astray, seen_s=now_s) for each in known))


def judge(memory: Memory, seen: Sequence[Seen]) -> list[Standing]:
    """What each volume is: one standing for each path in `seen`, then one for each known volume that is nowhere."""
    by_id = {each.mark_id: each.path for each in seen if each.mark_id}
    found = [_judge_path(memory, each, by_id) for each in seen]
    told = {each.volume_id for each in found} | {each.path for each in found} | set(by_id)
    for known in memory.volumes:
        if known.volume_id not in told:
            detail = f"its path {known.path or '(unknown)'} is not among the node's volumes"
            found.append(Standing(known.volume_id, known.path, "missing", detail, _get_back(known)))
    if any(known.owes and _state_of(found, known.volume_id) != "present" for known in memory.volumes):
        found = [_wait(each) if each.state == "fresh" else each for each in found]
    return found


def _judge_path(memory: Memory, seen: Seen, by_id: Mapping[str, str]) -> Standing:
    path = seen.path
    lay_here = next((known for known in memory.volumes if known.path == path), None)
    if lay_here is not None and lay_here.volume_id in by_id and by_id[lay_here.volume_id] != path:
        lay_here = None  # it lies elsewhere now
    if seen.mark_id:
        return _judge_marked(memory, seen, lay_here)
    if lay_here is not None:
        return _judge_unmarked(seen, lay_here)
    if seen.has_data and not memory.volumes:
        return Standing("", path, "present", "its mark was lost, and is made anew")
    if path in memory.ordered:
        return Standing("", path, "fresh")
    what = "holds other files" if seen.foreign else "is empty" if seen.exists else "does not exist"
    return Standing("", path, "new", f"it {what}, and nobody ordered a volume there", _order(path))


def _judge_marked(memory: Memory, seen: Seen, lay_here: KnownVolume | None) -> Standing:
    path, known = seen.path, next((each for each in memory.volumes if each.volume_id == seen.mark_id), None)
    if known is not None:
        if known.owes and not seen.has_durable:
            detail = "its durable index is gone, which held what only this node has"
            return Standing(known.volume_id, path, "emptied", detail, _get_back(known))
        return Standing(known.volume_id, path, "present", weight=seen.weight)
    if lay_here is not None and lay_here.volume_id != path:
        detail = f"another volume, {seen.mark_id}, lies at its path"
        return Standing(lay_here.volume_id, path, "swapped", detail, _get_back(lay_here))
    if seen.mark_id in memory.given_up:
        detail = f"volume {seen.mark_id} was given up for lost, and is back with what it owed then"
        return Standing(seen.mark_id, path, "new", detail, f"empty the directory, then {_order(path)}")
    if path in memory.ordered or lay_here is not None:
        return Standing(seen.mark_id, path, "present", weight=seen.weight)
    return Standing(seen.mark_id, path, "new", "it was never of this node, and nobody ordered it", _order(path))


def _judge_unmarked(seen: Seen, known: KnownVolume) -> Standing:
    """At the path of a known volume there is no mark."""
    change = _get_back(known)
    if seen.foreign:
        detail = f"its path holds other files ({seen.foreign})"
        return Standing(known.volume_id, seen.path, "swapped", detail, change)
    if seen.is_empty:
        detail = "its directory is empty: nothing is mounted there" if seen.exists else "its directory does not exist"
        return Standing(known.volume_id, seen.path, "missing", detail, change)
    if seen.has_data and (seen.has_durable or not known.owes) and known.weight:
        return Standing(
            known.volume_id, seen.path, "present", "its mark was lost, and is made again", weight=known.weight
        )
    return Standing(known.volume_id, seen.path, "emptied", "its directory is there, and its content is not", change)


def _wait(fresh: Standing) -> Standing:
    detail = "another volume that owes something is not here: until it is back or given up, none is made"
    return Standing("", fresh.path, "new", detail, "get the other volume back, or give it up, and restart the node")


def _state_of(found: Iterable[Standing], volume_id: str) -> str:
    return next((each.state for each in found if volume_id in (each.volume_id, each.path)), "missing")


def _get_back(known: KnownVolume) -> str:
    where = known.path if known.path and known.path != known.volume_id else "its path"
    give_up = f"`forebay volume give-up {known.volume_id}`"
    return f"bring it back to {where} (is its disk mounted?) and restart the node; if it is lost for good, {give_up}"


def _order(path: str) -> str:
    return f"`forebay volume add {path}`, and restart the node, to use it"


class Owners:
    """Which absent volume may own a key. Made anew whenever the known or the usable volumes change."""

    def __init__(self, known: Iterable[KnownVolume] = (), usable: Collection[str] = ()) -> None:
        volumes = list(known)
        self._absent = [each for each in volumes if each.volume_id not in usable]
        self._members = Members({each.volume_id: each.weight for each in volumes if each.weight})
        self._owing = [each for each in self._absent if each.owes]

    def __bool__(self) -> bool:
        """Whether any volume that may own something is absent."""
        return bool(self._owing)

    def home(self, bucket: str, key: str) -> str:
        """Where the key belongs among all known volumes; "" when nobody knows any."""
        return self._members.first(bucket, key) if self._members.ids else ""

    def strays(self, bucket: str, key: str, volume_id: str) -> bool:
        """Whether a key that is written to this volume may belong to one that is absent."""
        if not self._absent:
            return False
        return self.home(bucket, key) != volume_id or not all(each.weight for each in self._absent)

    def of_key(self, bucket: str, key: str) -> KnownVolume | None:
        """The absent volume that may own the key."""
        for each in self._owing:
            if bucket in each.astray or (bucket in each.buckets and self.home(bucket, key) == each.volume_id):
                return each
        return None

    def of_bucket(self, bucket: str) -> list[KnownVolume]:
        """The absent volumes that may own something of the bucket."""
        return [each for each in self._owing if each.owes_in(bucket)]
