"""Permits for a scarce thing in equal pieces: the shell of `machines/shares.py`. There are two such things: the
requests that a bucket may have under way at once, and the memory for bytes that no disk takes.

Invariant. A claim that was entered leaves, whether its turn came or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Self

from forebay.core import limits
from forebay.core.machines.shares import Need, Shares


class Claim:
    """The right to one permit. `async with` it: inside, the request may be made. Or `take` it, and `leave` it once. For
    one task."""

    __slots__ = ("_number", "_permits", "_turn", "need", "owner")

    def __init__(self, permits: Permits, owner: Hashable, need: Need) -> None:
        self.owner, self.need = owner, need
        self._permits = permits
        self._number = 0
        self._turn: asyncio.Future[None] | None = None

    @property
    def waits(self) -> bool:
        """Whether the claim was entered and has no permit yet."""
        return self._turn is not None and not self._turn.done()

    def hasten(self) -> None:
        """Somebody waits for these bytes now."""
        if self.waits:
            self._permits.give(self._permits.shares.hasten(self._number))

    def given(self) -> None:
        """For `Permits`: the claim's turn has come."""
        assert self._turn is not None
        if not self._turn.done():
            self._turn.set_result(None)

    async def take(self) -> None:
        """Wait for a permit, and hold it. A cancelled wait holds nothing."""
        self._turn = asyncio.get_running_loop().create_future()
        self._number = self._permits.ask(self)
        try:
            await self._turn
        except asyncio.CancelledError:
            self.leave()
            raise

    def take_now(self) -> bool:
        """Take a permit if one is free now; return whether it did."""
        self._turn = asyncio.get_running_loop().create_future()
        self._number = self._permits.ask(self)
        if self.waits:
            self.leave()
            return False
        return True

    def leave(self) -> None:
        """Give the permit back."""
        self._permits.leave(self._number)

    async def __aenter__(self) -> Self:
        await self.take()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()


class Permits:
    """See the module's header."""

    def __init__(self, permits: int = limits.FETCHES_MAX, ahead_max: int = limits.FETCHES_AHEAD_MAX) -> None:
        self.shares = Shares(permits, ahead_max)
        self._claims: dict[int, Claim] = {}
        self._number = 0

    @property
    def waiting(self) -> int:
        """How many claims wait for a permit."""
        return len(self.shares.claims) - len(self.shares.given)

    def claim(self, owner: Hashable, need: Need) -> Claim:
        """A claim to one permit, not entered yet. Owners that hold few go before those that hold many."""
        return Claim(self, owner, need)

    def ask(self, claim: Claim) -> int:
        """For `Claim`: enter it; returns its number."""
        self._number += 1
        number = self._number
        self._claims[number] = claim
        self.give(self.shares.ask(number, claim.owner, claim.need))
        return number

    def leave(self, number: int) -> None:
        """For `Claim`: remove it."""
        del self._claims[number]
        self.give(self.shares.leave(number))

    def give(self, numbers: list[int]) -> None:
        """For `Claim`: the turn of these has come."""
        for number in numbers:
            self._claims[number].given()
