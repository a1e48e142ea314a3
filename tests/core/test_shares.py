"""Permits of a bucket: to the neediest, then to who has least; beside a model that sorts everything."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.core.machines.shares import Need, Shares

PERMITS, AHEAD = 4, 3


class SharesStory(RuleBasedStateMachine):
    """Owners ask, are hastened and leave in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares(PERMITS, AHEAD)
        self.asked: dict[int, tuple[str, Need]] = {}
        self.order: list[int] = []  # of those that wait, in the order of asking
        self.given: set[int] = set()
        self.count = 0

    def expected(self) -> list[int]:
        """What a permit each is given to, one after the other."""
        found = []
        while len(self.given) < PERMITS:
            ahead = sum(self.asked[claim][1] == Need.AHEAD for claim in self.given)
            may = [claim for claim in self.order if self.asked[claim][1] != Need.AHEAD or ahead < AHEAD]
            if not may:
                break

            def rank(claim: int) -> tuple[int, int]:
                owner, need = self.asked[claim]
                return need, sum(self.asked[other][0] == owner for other in self.given)

            best = min(map(rank, may))
            oldest = {}  # of each owner's at this need, the one that has waited there longest
            for claim in self.order:
                if claim in may and rank(claim) == best:
                    oldest.setdefault(self.asked[claim][0], claim)
            claim = min(oldest.values())
            self.order.remove(claim)
            self.given.add(claim)
            found.append(claim)
        return found

    @rule(owner=st.sampled_from("abc"), need=st.sampled_from(list(Need)))
    def ask(self, owner: str, need: Need) -> None:
        self.count += 1
        self.asked[self.count] = (owner, need)
        self.order.append(self.count)
        assert self.shares.ask(self.count, owner, need) == self.expected()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def hasten(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(sorted(self.asked)))
        owner, need = self.asked[claim]
        if claim in self.order and need == Need.AHEAD:
            self.asked[claim] = (owner, Need.NEXT)
            self.order.remove(claim)
            self.order.append(claim)
        assert self.shares.hasten(claim) == self.expected()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(sorted(self.asked)))
        del self.asked[claim]
        if claim in self.order:
            self.order.remove(claim)
        self.given.discard(claim)
        assert self.shares.leave(claim) == self.expected()

    @invariant()
    def keeps_its_invariants(self) -> None:
        self.shares.check()
        assert self.shares.given == self.given


SharesStory.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestSharesStory = SharesStory.TestCase


def test_who_needs_its_first_byte_finds_a_permit_beside_everybodys_read_ahead() -> None:
    shares = Shares(64, 48)
    claims = iter(range(10_000))
    given = [shares.ask(next(claims), f"slow {reader}", Need.AHEAD) for reader in range(200) for _ in range(4)]
    assert sum(map(len, given)) == 48
    first = next(claims)
    assert shares.ask(first, "quick", Need.FIRST) == [first]


def test_a_permit_that_comes_free_goes_to_who_has_least() -> None:
    shares = Shares(3, 2)
    assert [shares.ask(claim, "many", Need.AHEAD) for claim in range(4)] == [[0], [1], [], []]
    assert shares.ask(9, "few", Need.AHEAD) == []
    assert shares.leave(0) == [9]
    assert shares.hasten(3) == [3]
