"""What a node makes of its volumes at a start, told as stories; and which absent one may own a key."""

from __future__ import annotations

import random

import pytest

from forebay.core.placement import Members
from forebay.core.volumes import KnownVolume, Memory, Owners, Seen, Standing, first_memory, judge, memory_of_marks

ONE = KnownVolume("v1", "/a", 10.0, buckets=("ckpt",), owed_objects=3, owed_bytes=300)
TWO = KnownVolume("v2", "/b", 10.0)


def marked(path: str, volume_id: str, **more: object) -> Seen:
    return Seen(path, True, volume_id, 10.0, has_data=True, has_durable=True, leftovers=True, **more)  # type: ignore[arg-type]


def states(found: list[Standing]) -> list[tuple[str, str, str]]:
    return [(each.volume_id, each.path, each.state) for each in found]


def test_the_first_start_makes_every_volume_and_a_later_one_makes_none() -> None:
    nothing = [Seen("/a", exists=False), Seen("/b")]
    memory = first_memory(["/a", "/b"])
    assert states(judge(memory, nothing)) == [("", "/a", "fresh"), ("", "/b", "fresh")]
    memory = memory.with_volume(ONE).with_volume(TWO)
    assert memory.ordered == ()
    assert states(judge(memory, nothing)) == [("v1", "/a", "missing"), ("v2", "/b", "missing")]


def test_a_first_start_that_was_cut_takes_what_it_had_made() -> None:
    (found,) = judge(first_memory(["/a"]), [marked("/a", "v9")])
    assert (found.volume_id, found.state) == ("v9", "present")


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (marked("/a", "v1"), "present"),
        (Seen("/a", exists=False), "missing"),
        (Seen("/a"), "missing"),
        (marked("/a", "v7"), "swapped"),
        (Seen("/a", foreign="photos"), "swapped"),
        (Seen("/a", True, "v1", 10.0, has_data=True, leftovers=True), "emptied"),
        (Seen("/a", has_data=True, leftovers=True), "emptied"),
        (Seen("/a", leftovers=True), "emptied"),
        (Seen("/a", has_data=True, has_durable=True, leftovers=True), "present"),
    ],
)
def test_what_lies_where_a_volume_lay(seen: Seen, state: str) -> None:
    (found,) = judge(Memory((ONE,)), [seen])
    assert (found.volume_id, found.path, found.state) == ("v1", "/a", state)
    assert bool(found.change) == (state != "present"), "what is wrong comes with what to do"
    if state == "present":
        assert found.weight == 10.0, "a mark that was lost is made again as it was"


def test_what_owed_nothing_may_lose_its_durable_index() -> None:
    (found,) = judge(Memory((TWO,)), [Seen("/b", True, "v2", 10.0, has_data=True, leftovers=True)])
    assert found.state == "present"


def test_disks_that_changed_places_are_both_there() -> None:
    found = judge(Memory((ONE, TWO)), [marked("/a", "v2"), marked("/b", "v1")])
    assert states(found) == [("v2", "/a", "present"), ("v1", "/b", "present")]


def test_a_volume_at_another_path_is_there_and_its_old_path_is_nobodys() -> None:
    found = judge(Memory((ONE,)), [Seen("/a"), marked("/c", "v1")])
    assert states(found) == [("", "/a", "new"), ("v1", "/c", "present")]


def test_a_volume_that_the_node_is_told_of_no_more_is_missing() -> None:
    found = judge(Memory((ONE, TWO)), [marked("/b", "v2")])
    assert states(found) == [("v2", "/b", "present"), ("v1", "/a", "missing")]


def test_what_nobody_ordered_is_left_alone_until_somebody_does() -> None:
    seen = [marked("/b", "v2"), Seen("/c", exists=False), marked("/d", "v8")]
    memory = Memory((TWO,))
    assert [each.state for each in judge(memory, seen)] == ["present", "new", "new"]
    memory = Memory((TWO,), ordered=("/c", "/d"))
    assert [each.state for each in judge(memory, seen)] == ["present", "fresh", "present"]


def test_while_a_volume_that_owes_is_away_no_other_is_made() -> None:
    memory = Memory((ONE, TWO), ordered=("/c",))
    found = judge(memory, [Seen("/a"), marked("/b", "v2"), Seen("/c", exists=False)])
    assert [each.state for each in found] == ["missing", "present", "new"]
    found = judge(memory, [marked("/a", "v1"), Seen("/b"), Seen("/c", exists=False)])
    assert [each.state for each in found] == ["present", "missing", "fresh"], "what owes nothing keeps nobody out"


def test_what_was_given_up_does_not_come_back_with_what_it_owed() -> None:
    memory = Memory((TWO,), ordered=("/a",), given_up=("v1",))
    (found, _) = judge(memory, [marked("/a", "v1"), marked("/b", "v2")])
    assert (found.state, "empty the directory" in found.change) == ("new", True)


def test_a_node_from_before_remembers_by_the_marks_of_its_volumes() -> None:
    seen = [marked("/a", "v1", members=("v1", "v2")), Seen("/b")]
    memory = memory_of_marks(seen, ["local", "back"], 5.0)
    assert [(each.volume_id, each.path, each.astray) for each in memory.volumes] == [
        ("v1", "/a", ("back", "local")),
        ("v2", "/b", ("back", "local")),
    ]
    assert [each.state for each in judge(memory, seen)] == ["present", "missing"]
    alone = memory_of_marks([Seen("/a", exists=False)], ["back"], 5.0)
    (found,) = judge(alone, [Seen("/a", exists=False)])
    assert (found.volume_id, found.state) == ("/a", "missing"), "the only volume of a node that ran is not made again"
    (found,) = judge(alone, [marked("/a", "v1")])
    assert (found.volume_id, found.state) == ("v1", "present")
    assert alone.with_volume(ONE).volumes == (ONE,), "its id takes the place of its path"


def test_an_absent_volume_may_own_what_belongs_to_it_among_all() -> None:
    owners = Owners((ONE, TWO), {"v2"})
    assert owners
    homes = Members({"v1": 10.0, "v2": 10.0})
    keys = [f"key-{n}" for n in range(200)]
    for key in keys:
        found = owners.of_key("ckpt", key)
        assert (found is ONE) == (homes.first("ckpt", key) == "v1")
        assert owners.of_key("corpus", key) is None, "it owes nothing there"
        assert owners.strays("ckpt", key, "v2") == (homes.first("ckpt", key) == "v1")
    assert owners.of_bucket("ckpt") == [ONE]
    assert not Owners((ONE, TWO), {"v1", "v2"})
    assert not Owners((ONE, TWO), {"v1"}), "what owes nothing is missed by nobody"


def test_a_volume_that_owes_astray_may_own_any_key_of_the_bucket() -> None:
    astray = KnownVolume("v2", "/b", 10.0, astray=("ckpt",))
    owners = Owners((ONE, astray), {"v1"})
    assert all(owners.of_key("ckpt", f"key-{n}") is astray for n in range(50))
    unknown = KnownVolume("/c", "/c", astray=("ckpt",))
    owners = Owners((TWO, unknown), {"v2"})
    assert owners.of_key("ckpt", "key") is unknown
    assert owners.strays("corpus", "key", "v2"), "nobody knows what belongs to a volume without a weight"


@pytest.mark.parametrize("seed", range(15))
def test_no_history_of_volumes_hides_what_one_of_them_owns(seed: int) -> None:
    """Volumes come, go, are added and given up; keys are written as the node would write them. Whoever may read a key
    reads the last write of it: no older one, and none that is hidden on an absent volume."""
    chance = random.Random(seed)
    known = {f"v{n}": KnownVolume(f"v{n}", f"/{n}", float(chance.randint(1, 4))) for n in range(3)}
    held: dict[str, dict[str, int]] = {volume_id: {} for volume_id in known}  # what lies on each disk
    last: dict[str, int] = {}
    keys = [f"key-{n}" for n in range(12)]
    for step in range(30):
        usable = {volume_id for volume_id in known if chance.random() < 0.7}
        if all(not each.owes or each.volume_id in usable for each in known.values()) and chance.random() < 0.3:
            added = f"v{len(held)}"
            known[added] = KnownVolume(added, f"/{added}", float(chance.randint(1, 4)))
            held[added] = {}
            usable.add(added)
        if usable:
            here = Members({volume_id: known[volume_id].weight for volume_id in usable})
            for volume_id in usable:  # what a start does: everything to its place, the later write wins
                for key, value in list(held[volume_id].items()):
                    home = here.first("ckpt", key)
                    held[home][key] = max(value, held[home].get(key, 0))
                    if home != volume_id:
                        del held[volume_id][key]
            for volume_id in usable:
                owed = ("ckpt",) if held[volume_id] else ()
                known[volume_id] = KnownVolume(volume_id, f"/{volume_id}", known[volume_id].weight, owed)
            for number, key in enumerate(keys):
                owners = Owners(known.values(), usable)
                if owners.of_key("ckpt", key) is not None:
                    continue
                home = here.first("ckpt", key)
                assert held[home].get(key, 0) == last.get(key, 0), (seed, step, key)
                if chance.random() < 0.4:
                    field = "astray" if owners.strays("ckpt", key, home) else "buckets"
                    at = known[home]
                    noted = {"buckets": at.buckets, "astray": at.astray} | {field: ("ckpt",)}
                    known[home] = KnownVolume(home, at.path, at.weight, **noted)
                    held[home][key] = last[key] = step * 100 + number + 1
        absent = [volume_id for volume_id in known if volume_id not in usable]
        if absent and chance.random() < 0.1:
            doomed = chance.choice(absent)
            del known[doomed]
            lost = held.pop(doomed)
            held[doomed] = {}
            last = {key: value for key, value in last.items() if lost.get(key) != value}
