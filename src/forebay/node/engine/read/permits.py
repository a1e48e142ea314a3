"""What is given out in equal pieces to who needs it most: the shell of `machines/shares.py`. There are two such things:
the requests of one bucket that may be under way at once, and the memory for bytes that no disk takes.

Invariant. A claim that was entered leaves, whether its turn came or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Self

from forebay.core import limits
from forebay.core.machines.shares import Need, Shares


class Claim:
    """`async with` it: inside, the request may be made. For one task. Or `take` it, and `leave` it once."""

    __slots__ = ("_number", "_permits", "_turn", "need", "owner")

    def __init__(self, permits: Permits, owner: Hashable, need: Need) -> None:
        self.owner, self.need = owner, need
        self._permits = permits
        self._number = 0
        self._turn: asyncio.Future[None] | None = None

    @property
    def waits(self) -> bool:
        """Whether it has been asked for and not been given."""
        return self._turn is not None and not self._turn.done()

    def hasten(self) -> None:
        """Somebody waits for these bytes now."""
        if self.waits:
            self._permits.give(self._permits.shares.hasten(self._number))

    def given(self) -> None:
        """For `Permits`: its turn has come."""
        assert self._turn is not None
        if not self._turn.done():
            self._turn.set_result(None)

    async def take(self) -> None:
        """Wait for its turn, and hold it. Cancelling the wait holds nothing."""
        self._turn = asyncio.get_running_loop().create_future()
        self._number = self._permits.ask(self)
        try:
            await self._turn
        except asyncio.CancelledError:
            self.leave()
            raise

    def take_now(self) -> bool:
        """Hold it if that needs no waiting; whether it does."""
        self._turn = asyncio.get_running_loop().create_future()
        self._number = self._permits.ask(self)
        if self.waits:
            self.leave()
            return False
        return True

    def leave(self) -> None:
        """Hold it no more."""
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
        """How many claims were entered and not given."""
        return len(self.shares.claims) - len(self.shares.given)

    def claim(self, owner: Hashable, need: Need) -> Claim:
        """The right to one of them, to be entered. `owner`s that hold few go before those that hold many."""
        return Claim(self, owner, need)

    def ask(self, claim: Claim) -> int:
        """For `Claim`: its number."""
        self._number += 1
        number = self._number
        self._claims[number] = claim
        self.give(self.shares.ask(number, claim.owner, claim.need))
        return number

    def leave(self, number: int) -> None:
        """For `Claim`."""
        del self._claims[number]
        self.give(self.shares.leave(number))

    def give(self, numbers: list[int]) -> None:
        """For `Claim`: the turn of these has come."""
        for number in numbers:
            self._claims[number].given()
