"""What memberships agree on is what anybody would say who sees everything, and no more moves than must."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.cluster.lease import LeaseHold
from forebay.core.cluster.membership import (
    Answered,
    Covered,
    Due,
    Event,
    Lost,
    Membership,
    Owes,
    Released,
    Settle,
    Settled,
    StandAside,
    StoodAside,
    Told,
    Write,
)
from forebay.core.cluster.mirror import Mirror
from forebay.core.cluster.next_map import HOLDS_AFTER_S
from forebay.core.cluster.records import (
    ALIVE,
    LOCAL_TWICE,
    MAP,
    NODES,
    PAST_MAX,
    PREFIX,
    TWICE,
    Loss,
    Map,
    NodeRecord,
    Wanted,
    encoded,
    wanted_record,
)
from forebay.core.errors import ForebayError
from forebay.sim.agreed import Agreed

TTL_S = 10.0
NONSENSE = b"nonsense"
KEYS = [f"key-{number}" for number in range(600)]


class Node:
    """A membership and the copy that it decides from."""

    def __init__(self, membership: Membership) -> None:
        self.membership, self.mirror = membership, Mirror()


class Town:
    """Nodes whose every question is answered at once, so that each change comes to its end before the next."""

    def __init__(self) -> None:
        self.agreed = Agreed()
        self.now_s = 0.0
        self.nodes: dict[str, Node] = {}
        self.maps: list[Map] = []
        self.owing: set[str] = set()
        self.keeping: set[str] = set()  # what is at home elsewhere
        self.copying: set[str] = set()  # what it alone has lies on another node too, by the map that it knows
        self.busy: set[str] = set()  # what is under way there does not end
        self.turns: dict[str, int] = {}  # of standing aside, there
        self.agreed.told.append(lambda changes: self.maps.extend(self._maps(changes)))

    @staticmethod
    def _maps(changes: list) -> list[Map]:
        return [
            msgspec.json.decode(value, type=Map)
            for key, value, _ in changes
            if key == MAP and value not in (None, NONSENSE)
        ]

    def start(
        self, name: str, weight: float = 1.0, incarnation: str = "", protocol: int = 1, *, local: str = ""
    ) -> Membership:
        kept = {"back": "written back" + TWICE, **({"own": local} if local else {})}
        record = NodeRecord(name, weight, buckets=kept, replaced=True, protocol=protocol, hands_over=True)
        membership = Membership(name, incarnation or f"{name}.{self.now_s}", record, LeaseHold(TTL_S))
        self.nodes[incarnation or name] = Node(membership)
        return membership

    def stop(self, name: str) -> None:
        """Its process ends; its lease, when its time has come."""
        self.agreed.end(self.nodes.pop(name).membership.hold.lease)

    def step(self, name: str, event: Event) -> None:
        self._step(self.nodes[name], event)

    def want(self, name: str, word: Wanted) -> None:
        entry = self.agreed.entries[NODES + name]
        self.agreed.transact({entry.key: wanted_record(entry.value, word)}, {entry.key: entry.revision})

    def quiet(self, seconds: float = 5.0) -> None:
        """Let time pass, and everybody look often."""
        for _ in range(int(seconds / 0.25)):
            self.now_s += 0.25
            for name, node in list(self.nodes.items()):
                self._look(name, node)

    def _look(self, name: str, node: Node) -> None:
        hold = node.membership.hold
        if hold.due_s <= self.now_s:
            hold.ask(self.now_s)
            if hold.lease:
                hold.renewed(self.now_s)
            else:
                hold.taken(self.now_s, self.agreed.grant(), TTL_S)
        changes = node.mirror.listed(self.agreed.under(PREFIX), self.agreed.revision)
        self._step(node, Told(tuple(changes), self.agreed.revision))
        self._step(node, Owes(1 if name in self.owing else 0))
        if name not in self.keeping and node.membership.map is not None:
            self._step(node, Released(node.membership.map.epoch))
        if name in self.copying and node.membership.map is not None:
            self._step(node, Covered(node.membership.map.due))
        self._step(node, Due())

    def _step(self, node: Node, event: Event) -> None:
        for effect in node.membership.step(self.now_s, event):
            if isinstance(effect, Settle):
                self._step(node, Settled(effect.epoch))
            elif isinstance(effect, StandAside):
                self.turns[node.membership.node] = effect.turn
                if node.membership.node not in self.busy:
                    self._step(node, StoodAside(effect.turn))
            else:
                self._step(node, Answered(self._write(effect)))
        node.membership.check()

    def _write(self, write: Write) -> int:
        try:
            return self.agreed.transact(write.changes, write.when, write.lease)
        except ForebayError:
            return 0

    @property
    def map(self) -> Map:
        return self.maps[-1]


@given(seed=st.integers(0, 2**32))
def test_the_map_is_what_is_wanted_and_lives_and_no_more_moves_than_must(seed: int) -> None:
    chance, town = random.Random(seed), Town()
    weights: dict[str, float] = {}
    words: dict[str, Wanted] = {}
    for _ in range(8):
        name = chance.choice("abcdef")
        if name in town.nodes and chance.random() < 0.4:
            town.stop(name)
        elif name in words and chance.random() < 0.6:
            words[name] = chance.choice(["active", "draining", "maintenance"])
            town.want(name, words[name])
        elif name not in town.nodes and words.get(name) != "draining":
            weights[name] = chance.choice([1.0, 2.0])
            words.setdefault(name, "active")
            town.start(name, weights[name])
        town.quiet()
        words = {one: "gone" if word == "draining" and one in town.nodes else word for one, word in words.items()}
        if not town.nodes:
            continue
        living = {one for one in town.nodes if ALIVE + one in town.agreed.entries}
        if living:
            assert town.map.active
            assert town.map.owners == {one: weights[one] for one in sorted(living) if words[one] == "active"}
    settled = list({one.epoch: one for one in town.maps if one.active and one.owners}.values())
    for before, after in pairwise(settled):
        assert after.epoch > before.epoch
        for key in KEYS:
            was, is_ = before.home("b", key), after.home("b", key)
            if was != is_:
                lost = after.owners.get(was or "", 0.0) < before.owners.get(was or "", 0.0)
                won = after.owners.get(is_ or "", 0.0) > before.owners.get(is_ or "", 0.0)
                assert lost or won, f"{key} moved from {was} to {is_}, which neither lost nor won"


def test_nodes_own_by_their_size() -> None:
    town = Town()
    for name, weight in (("small", 1.0), ("middle", 2.0), ("large", 5.0)):
        town.start(name, weight)
    town.quiet()
    homes = Counter(town.map.home("b", f"key-{number}") for number in range(8000))
    for name, share in (("small", 1000), ("middle", 2000), ("large", 5000)):
        assert homes[name] == pytest.approx(share, rel=0.1)


def test_what_a_change_looks_like_to_those_who_act() -> None:
    """A joins alone; B comes, and what moves to it is nobody's until both act by the map."""
    town = Town()
    first = town.start("a")
    town.quiet()
    assert first.state("a") == "active"
    assert all(first.right(town.now_s, "b", key) for key in KEYS)
    second = town.start("b")
    while not (second.map and "b" in second.map.owners and not second.map.active):
        assert all(not second.right(town.now_s, "b", key) for key in KEYS)
        town.quiet(0.25)
    town.quiet()
    assert list(dict.fromkeys((one.epoch, one.active, tuple(sorted(one.owners))) for one in town.maps)) == [
        (1, True, ()), (2, False, ("a",)), (2, True, ("a",)), (3, False, ("a", "b")), (3, True, ("a", "b")),
    ]  # fmt: skip
    preparing = [one for one in town.maps if not one.active][-1]
    acting = {preparing.actor("b", key) for key in KEYS}
    assert acting == {"a", None}, "what stays with A goes on, what moves waits"
    for key in KEYS:
        one, other = first.right(town.now_s, "b", key), second.right(town.now_s, "b", key)
        assert (one is None) != (other is None)
        if other is not None:
            assert town.map.former_home("b", key) == "a", "whom it asks before the backend"


def test_what_only_nodes_have_stays_at_home_until_its_node_is_drained_or_given_up() -> None:
    town = Town()
    for name in "abc":
        town.start(name)
    town.quiet()
    before = town.map
    assert before.holders == before.owners == dict.fromkeys("abc", 1.0)
    assert before.past == (), "all brought nothing, and said so"

    town.stop("a")
    town.quiet(20.0)
    assert sorted(town.map.owners) == ["b", "c"]
    assert town.map.holders == before.holders, "what only A has is at home with A"
    assert town.map.past == ()
    town.keeping |= {"b", "c"}
    town.want("a", "gone")  # given up
    town.quiet()
    assert sorted(town.map.holders) == ["b", "c"]
    (past,) = town.map.past
    assert past.holders == before.holders
    for key in KEYS:
        held, holds = before.holder("b", key), town.map.holder("b", key)
        assert town.map.earlier("b", key) == {held} - {holds}
    town.keeping.clear()
    town.quiet()
    assert town.map.past == (past,), "it says which keys others may have copies of"
    town.copying = {"b", "c"}
    town.quiet()
    assert town.map.past == (), "nobody asks one that was given up"


def covered_town() -> Town:
    """Three nodes, all of whose keys lie on two of them."""
    town = Town()
    town.copying = {"a", "b", "c"}
    for name in "abc":
        town.start(name)
    town.quiet()
    return town


def test_a_node_whose_lease_ends_is_taken_over_if_others_have_what_it_had() -> None:
    town = covered_town()
    before = town.map
    assert before.covered == before.held > 0
    town.stop("a")
    town.copying = {"b"}
    town.quiet()
    taken = town.map
    assert (sorted(taken.holders), taken.deposed) == (["b", "c"], ("a",))
    for key in KEYS:
        if before.holder("b", key) == "a":
            assert taken.holder("b", key) == before.seconds("a", "b", key)[0], "who has the copy is the home"
        else:
            assert taken.holder("b", key) == before.holder("b", key)

    town.stop("b")
    town.quiet()
    assert sorted(town.map.holders) == ["b", "c"], "what B alone has was not covered again"
    town.start("b")
    town.keeping = {"a"}
    back = town.start("a")
    town.quiet()
    assert not back.member(town.now_s), "it acts on nothing while it is deposed"
    town.keeping.clear()
    town.quiet()
    assert town.map.deposed == ("a",), "nobody has what it had twice, so it forgets nothing"
    town.copying = {"b", "c"}
    town.quiet()
    assert (sorted(town.map.holders), town.map.deposed) == (["a", "b", "c"], ())
    assert back.member(town.now_s)


def test_nobody_is_taken_over_until_what_another_lost_is_made_again() -> None:
    town = covered_town()
    before = town.map
    assert before.is_covered
    town.copying = {"b"}
    town.step("b", Lost())
    town.quiet()
    assert (town.map.held, town.map.covered, town.map.losers()) == (before.held, before.covered, {"b"})
    assert town.map.active, "nobody's keys move"
    town.stop("a")
    town.quiet()
    assert sorted(town.map.holders) == ["a", "b", "c"], "what A had B keep is nowhere else"
    town.start("a")
    town.copying = {"a", "b", "c"}
    town.quiet()
    assert town.map.is_covered
    assert town.map.losers() == set()
    epoch = town.map.epoch
    town.quiet()
    assert town.map.epoch == epoch, "one loss is one map"
    town.step("b", Lost())
    town.quiet()
    assert town.map.covered == town.map.due > epoch
    town.stop("a")
    town.quiet()
    assert town.map.deposed == ("a",)


def test_who_has_lost_copies_knows_when_they_are_made_again() -> None:
    two = {"a": 1.0, "b": 1.0}
    agreed = Map(4, True, two, two, two, held=2, covered=2)
    assert agreed.was_made_again("a", "a.1", 0)
    assert not agreed.was_made_again("a", "a.1", 1), "nobody has been told"
    agreed = msgspec.structs.replace(agreed, lost={"a": Loss("a.1", 1, 4)})
    assert not agreed.was_made_again("a", "a.1", 1)
    assert not agreed.was_made_again("a", "a.2", 0), "nor what the process before it lost"
    assert agreed.was_made_again("b", "b.1", 0)
    agreed = msgspec.structs.replace(agreed, covered=4)
    assert agreed.was_made_again("a", "a.1", 1)
    assert agreed.was_made_again("a", "a.2", 0)
    assert not agreed.was_made_again("a", "a.1", 2)


def test_a_node_that_keeps_a_bucket_once_is_waited_for() -> None:
    town = Town()
    town.copying = {"a", "b", "c"}
    for name in "abc":
        town.start(name)
    town.nodes["a"].membership.keeps({"back": "written back" + TWICE, "local": "local"})
    town.nodes["b"].membership.keeps({})
    town.quiet()
    assert town.map.covered == town.map.held > 0
    for name in "ab":
        town.stop(name)
    town.quiet()
    assert sorted(town.map.holders) == ["a", "b", "c"]
    town.start("a")
    town.nodes["a"].membership.keeps({"back": "written back" + TWICE})
    town.quiet()
    town.stop("a")
    town.quiet()
    assert (sorted(town.map.holders), town.map.deposed) == (["b", "c"], ("a",))


def test_the_last_holder_and_one_in_maintenance_are_waited_for() -> None:
    town = Town()
    town.copying = {"a", "b"}
    town.start("a")
    town.quiet()
    town.start("b")
    town.quiet()
    town.want("a", "maintenance")
    town.quiet()
    town.stop("a")
    town.quiet()
    assert sorted(town.map.holders) == ["a", "b"]
    town.start("a")
    town.want("a", "active")
    town.quiet()
    town.stop("b")
    town.quiet()
    assert sorted(town.map.holders) == ["a"]
    town.stop("a")
    town.start("b")
    town.quiet()
    for key in KEYS:
        home = town.map.holder("b", key)
        assert home == "a" or town.map.earlier("b", key) == {"a"}, "B acts on nothing before A says what it has"


def test_a_map_of_a_release_without_copies_has_nobody_taken_over() -> None:
    town = Town()
    for name in "ab":
        town.start(name)
    town.quiet()
    entry = town.agreed.entries[MAP]
    early = msgspec.json.decode(entry.value)
    for name in ("held", "covered", "deposed"):
        del early[name]
    town.agreed.transact({MAP: msgspec.json.encode(early)}, {})
    town.copying = {"a", "b"}
    town.stop("b")
    town.quiet()
    assert sorted(town.map.holders) == ["a", "b"]
    assert town.map.deposed == ()


def test_a_drained_node_is_asked_until_it_is_gone_and_a_new_one_for_every_key() -> None:
    town = Town()
    town.start("a")
    town.start("b")
    town.quiet()
    town.keeping |= {"a", "c"}
    town.owing.add("a")
    town.want("a", "draining")
    town.quiet()
    assert town.map.holders == {"b": 1.0}
    assert {frozenset(town.map.earlier("b", key)) for key in KEYS} == {frozenset("a"), frozenset()}
    town.start("c")
    town.quiet()
    assert town.map.owners.keys() == {"b", "c"}
    assert town.map.holders == {"b": 1.0}, "C has something from before"
    town.quiet(HOLDS_AFTER_S)
    moved = [key for key in KEYS if town.map.holder("b", key) == "c" and town.map.past[0].holders]
    assert moved
    assert all("c" in town.map.earlier("b", key) for key in KEYS if town.map.holder("b", key) == "b")
    town.owing.clear()
    town.quiet()
    assert town.nodes["a"].membership.state("a") == "leaving", "what it has cached counts as confirmed still"
    town.keeping.clear()
    town.quiet()
    assert town.map.past == ()


def test_of_many_changes_that_are_owed_the_oldest_become_one() -> None:
    """A node with local objects never has nothing left. Whoever may have a key is asked all the same."""
    town = Town()
    town.start("a")
    town.quiet()
    town.keeping.add("a")
    held: dict[str, set[str]] = {key: set() for key in KEYS}
    for number in range(2 * PAST_MAX):
        for key in KEYS:
            if home := town.map.holder("b", key):
                held[key].add(home)
        town.start(f"b{number}")
        town.quiet(20.0)
        assert town.map.holders == town.map.owners, "each change takes effect"
        assert len(town.map.past) <= PAST_MAX
    for key in KEYS:
        kept = {"a"} if "a" in held[key] and town.map.holder("b", key) != "a" else set()
        assert kept <= town.map.earlier("b", key)
    town.keeping.clear()
    town.quiet(20.0)
    assert town.map.past == ()


def test_a_cluster_whose_nodes_were_all_drained_again_and_again_has_holders_again() -> None:
    town = Town()
    for name in "ab":
        town.start(name)
    town.quiet()
    town.keeping.update("ab")
    for _ in range(PAST_MAX):
        for name in "ab":
            town.want(name, "draining")
        town.quiet()
        assert town.map.holders == {}
        for name in "ab":
            town.want(name, "active")
        town.quiet(20.0)
        assert set(town.map.holders) == {"a", "b"}


def test_a_node_drains_when_it_owes_nothing_and_not_before() -> None:
    town = Town()
    node = town.start("a")
    town.start("b")
    town.quiet()
    town.owing.add("a")
    town.want("a", "draining")
    town.quiet()
    assert node.state("a") == "leaving"
    assert town.map.owners == {"b": 1.0}
    assert all(not node.right(town.now_s, "b", key) for key in KEYS)
    town.owing.clear()
    town.quiet()
    assert node.state("a") == "gone"
    town.quiet()
    assert ALIVE + "a" not in town.agreed.entries, "it does not come back by itself"
    town.want("a", "active")
    town.quiet()
    assert sorted(town.map.owners) == ["a", "b"]


def local_town(names: str = "abc", local: str = LOCAL_TWICE) -> Town:
    """Nodes with local objects, all of which lie on two of them."""
    town = Town()
    town.copying, town.owing = set(names), set(names)
    for name in names:
        town.start(name, local=local)
    town.quiet()
    assert town.map.is_covered
    return town


def test_a_node_with_local_objects_hands_them_over_and_goes() -> None:
    town = local_town()
    before, node = town.map, town.nodes["a"].membership
    town.busy.add("a")
    town.want("a", "draining")
    town.quiet()
    assert (sorted(town.map.owners), sorted(town.map.holders)) == (["b", "c"], ["a", "b", "c"])
    assert node.member(town.now_s), "what is under way may be acknowledged"
    assert not node.acts_until_s(town.now_s), "and nothing begins"
    town.copying = {"b"}
    town.keeping.add("a")
    town.step("a", StoodAside(town.turns["a"]))
    assert not node.member(town.now_s)
    town.quiet()
    assert (sorted(town.map.holders), town.map.deposed, town.map.past) == (["b", "c"], ("a",), ())
    for key in KEYS:
        home = before.holder("b", key)
        assert town.map.holder("b", key) == (before.seconds("a", "b", key)[0] if home == "a" else home)
    town.copying = {"b", "c"}
    town.quiet()
    assert town.map.is_covered
    assert node.state("a") == "leaving", "it has forgotten nothing"
    town.keeping.clear()
    town.quiet()
    assert town.map.deposed == ()
    assert node.state("a") == "leaving", "it owes something still"
    town.owing.remove("a")
    town.quiet()
    assert node.state("a") == "gone"
    town.want("a", "active")
    town.copying.add("a")
    town.quiet(20.0)
    assert sorted(town.map.holders) == ["a", "b", "c"]
    assert node.acts_until_s(town.now_s)
    assert node.member(town.now_s)


def test_what_is_left_of_copies_once_all_was_covered_is_nobodys_whatever_changes_later() -> None:
    """A spare copy would become a second owner's, when its key has another home by a later map."""
    town = local_town()
    town.keeping.add("a")
    town.busy.add("a")
    town.want("a", "draining")
    town.quiet()
    town.copying = {"b"}
    town.step("a", StoodAside(town.turns["a"]))
    town.quiet()
    assert town.map.is_taking_over
    town.copying = {"b", "c"}
    town.quiet()
    assert (town.map.deposed, town.map.is_taking_over) == (("a",), False)
    town.start("d", local=LOCAL_TWICE)
    town.quiet(20.0)
    assert "d" in town.map.holders
    assert town.map.covered < town.map.held, "D has not compared"
    assert (town.map.deposed, town.map.is_taking_over) == (("a",), False)


def test_what_lies_on_two_nodes_does_so_still_when_a_node_has_handed_over() -> None:
    town = local_town("abcd")
    town.busy.add("b")
    town.want("b", "draining")
    town.quiet()
    before = town.map
    assert before.leaving == "b"
    town.keeping.add("b")
    town.step("b", StoodAside(town.turns["b"]))
    town.quiet()
    after = town.map
    assert (after.leaving, after.deposed) == ("", ("b",))
    for key in KEYS:
        home = after.holder("b", key)
        for actor in "abcd":
            kept = before.seconds(actor, "b", key)
            acts = home if actor == "b" else actor
            assert {acts, *after.seconds(acts, "b", key)} - {actor} <= set(kept), "nothing is sent before all is on two"
            assert len(kept) <= 2
            orphaned = msgspec.structs.replace(before, holders={n: w for n, w in before.holders.items() if n != actor})
            assert orphaned.holder("b", key) == kept[0], "and if its actor dies first, the home has it"
    assert sum(len(before.seconds("a", "b", key)) for key in KEYS) < 1.5 * len(KEYS)


def test_who_is_taken_back_acts_again_when_nobody_can_take_it_over_any_more() -> None:
    town = local_town()
    node = town.nodes["b"].membership  # A writes maps
    town.busy.add("b")
    town.want("b", "draining")
    town.quiet()
    town.step("b", StoodAside(town.turns["b"]))
    assert not node.member(town.now_s)
    aside = town.agreed.revision
    town.want("b", "active")
    entries = town.agreed.under(PREFIX)
    changes = town.nodes["b"].mirror.listed(entries, town.agreed.revision)
    written: list[Write] = []
    for effect in node.step(town.now_s, Told(tuple(changes), town.agreed.revision)):
        assert isinstance(effect, Write)
        written.append(effect)
    assert not node.acts_until_s(town.now_s), "the others know that it stands aside, and nothing else"
    assert not node.member(town.now_s)
    town.step("b", Answered(town._write(written[0])))
    town.quiet()
    assert town.agreed.entries[ALIVE + "b"].revision > aside
    assert node.acts_until_s(town.now_s)
    assert node.member(town.now_s)
    assert (sorted(town.map.holders), town.map.deposed) == (["a", "b", "c"], ())

    # by what A was told before, no map can be written
    town.want("b", "draining")
    town.quiet()
    turn = town.turns["b"]
    town.want("b", "active")
    town.quiet()
    town.step("b", StoodAside(turn))
    assert node.member(town.now_s), "what was asked before it was taken back counts for nothing"


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("some of it lies on one node alone", lambda town: town.copying.remove("c")),
        ("a bucket is kept once", lambda town: town.nodes["a"].membership.keeps({"own": LOCAL_TWICE, "one": "local"})),
        ("there is no local bucket", lambda town: town.nodes["a"].membership.keeps({"back": "back" + TWICE})),
        ("nobody stays", lambda town: [town.want(name, "draining") for name in "bc"]),
        ("it is of a release that hands nothing over", lambda town: forget_how(town, "a")),
    ],
)
def test_nobody_hands_over_where_that_would_lose_something_or_is_not_needed(why: str, change: Callable) -> None:
    town = local_town()
    change(town)
    if why.startswith("some"):
        town.step("c", Lost())
    town.keeping.add("a")
    town.want("a", "draining")
    town.quiet()
    if why.startswith("some"):
        assert "a" in town.map.holders, "it has what others may lack"
        assert town.nodes["a"].membership.acts_until_s(town.now_s), "and serves it"
        town.copying.add("c")
        town.quiet()
        assert town.map.deposed == ("a",)
    else:
        assert "a" not in town.map.holders
        assert town.map.deposed == ()
        assert town.map.past, "it is asked for what it has"


def forget_how(town: Town, name: str) -> None:
    record = msgspec.structs.replace(town.nodes[name].membership._record, hands_over=False)
    town.nodes[name].membership._record = record


def test_a_node_that_dies_while_it_waits_to_hand_over_is_taken_over() -> None:
    town = local_town()
    town.busy.add("a")
    town.want("a", "draining")
    town.quiet()
    town.stop("a")
    town.quiet()
    assert town.map.deposed == ("a",)
    town.quiet()
    town.keeping.clear()
    back = town.start("a", local=LOCAL_TWICE)
    town.owing.remove("a")
    town.quiet()
    assert town.map.is_covered
    assert back.state("a") == "gone", "it has forgotten all, and was to go"


def test_two_who_are_drained_at_once_hand_over_one_after_the_other() -> None:
    town = local_town("abcd")
    for name in "ab":
        town.want(name, "draining")
    town.quiet()
    town.owing -= {"a", "b"}
    seen = {each.deposed for each in town.maps}
    town.quiet(10.0)
    assert max(len(each) for each in seen) == 1
    assert sorted(town.map.holders) == ["c", "d"]
    assert {town.nodes["c"].membership.state(name) for name in "ab"} == {"gone"}


def test_a_node_whose_record_is_gone_or_says_nonsense_owns_nothing() -> None:
    town = Town()
    for name in "abc":
        town.start(name)
    town.quiet()
    assert sorted(town.map.owners) == ["a", "b", "c"]
    town.stop("b")
    town.agreed.transact({NODES + "b": None, NODES + "c": encoded(NodeRecord("c", 0.0))}, {})
    town.nodes["c"].membership._record = NodeRecord("c", 0.0)
    town.quiet()
    assert sorted(town.map.owners) == ["a"]


def test_of_two_processes_of_one_name_the_second_waits_for_the_first_to_end() -> None:
    town = Town()
    first = town.start("a", incarnation="one")
    town.quiet()
    second = town.start("a", incarnation="two")
    town.quiet()
    assert second.doubled
    assert not first.doubled
    assert all(second.right(town.now_s, "b", key) is None for key in KEYS)
    town.stop("one")
    town.quiet()
    assert not second.doubled
    assert all(second.right(town.now_s, "b", key) for key in KEYS)


def test_who_lost_its_lease_may_not_acknowledge_what_it_began() -> None:
    town = Town()
    node = town.start("a")
    town.quiet()
    right = node.right(town.now_s, "b", "key")
    assert right is not None
    assert node.still(town.now_s, right)
    assert node.remains(town.now_s) == node.member(town.now_s) == right.lease
    assert not node.still(town.now_s + TTL_S / 2, right), "by its own clock"
    assert not node.remains(town.now_s + TTL_S / 2)
    town.agreed.end(node.hold.lease)
    node.hold.ask(node.hold.due_s)
    node.hold.gone(town.now_s)
    town.quiet()
    assert node.right(town.now_s, "b", "key") is not None, "it came in again"
    assert not node.still(town.now_s, right), "others may have acted meanwhile"
    assert node.remains(town.now_s) not in (0, right.lease)


def test_what_cannot_be_read_is_nobodys_word() -> None:
    town = Town()
    first, second = town.start("a"), town.start("b")
    town.quiet()
    epoch = town.map.epoch

    for key in (NODES + "b", ALIVE + "b"):  # the node writes its own entries again
        town.agreed.transact({key: NONSENSE}, {})
        for name, node in list(town.nodes.items()):
            if name == "a":
                town._look(name, node)
        assert key in first.unreadable
        town.quiet()
        assert not first.unreadable
        assert town.map.owners.keys() == {"a", "b"}
    held = town.map.epoch

    town.agreed.transact({MAP: NONSENSE}, {})
    town.quiet()
    assert first.unreadable == {MAP}
    assert not any(one.right(town.now_s, "b", key) for one in (first, second) for key in KEYS)
    town.agreed.transact({MAP: None}, {})
    town.quiet()
    assert town.map.epoch > held >= epoch, "who acted by an older one takes this up as any other"
    assert all(first.right(town.now_s, "b", key) or second.right(town.now_s, "b", key) for key in KEYS)


def test_a_node_of_a_release_too_far_stays_out_and_a_neighbour_comes_in() -> None:
    town = Town()
    town.start("a")
    town.start("b")
    town.quiet()
    late = town.start("c", protocol=3)
    town.quiet()
    assert late.strangers == ["a", "b"]
    assert NODES + "c" not in town.agreed.entries, "nobody has to judge it"
    town.start("d", protocol=2)
    town.quiet()
    assert set(town.map.owners) == {"a", "b", "d"}
    # one after the other comes back with the next release, and those of the one before go on beside it
    for name in ("a", "b"):
        town.stop(name)
        upgraded = town.start(name, protocol=2)
        town.quiet(3 * TTL_S)
        assert upgraded.strangers == []
        assert set(town.map.owners) == {"a", "b", "d"} | ({"c"} if name == "b" else set())
    assert late.strangers == []
    assert set(town.map.owners) == {"a", "b", "c", "d"}
    assert town.agreed.entries[NODES + "a"].value.count(b'"protocol":2') == 1


def test_a_release_that_was_given_up_keeps_nobody_out() -> None:
    town = Town()
    town.start("a")
    town.quiet()
    town.stop("a")
    late = town.start("b", protocol=3)
    town.quiet(3 * TTL_S)
    assert late.strangers == ["a"]
    town.want("a", "gone")
    town.quiet()
    assert set(town.map.owners) == {"b"}
