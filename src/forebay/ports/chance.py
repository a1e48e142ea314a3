"""Chance as a door: the only place that draws random numbers.

Theory. Identifiers and jitter come from here, so that a test or the simulator can hand in a seeded source instead.
A `random.Random` satisfies `Chance` but for `token_hex`; `Seeded` adds it.
"""

from __future__ import annotations

import random as _random
import secrets
from typing import Protocol


class Chance(Protocol):
    """Where random numbers come from."""

    def random(self) -> float:
        """A float in [0, 1)."""
        ...

    def randbits(self, bits: int) -> int:
        """A whole number in [0, 2**bits)."""
        ...

    def token_hex(self, size_bytes: int) -> str:
        """`size_bytes` random bytes as lower-case hexadecimal digits, two for each."""
        ...


class SystemChance:
    """The operating system's source, good for secrets."""

    def random(self) -> float:
        return _random.random()  # jitter needs no secrecy

    def randbits(self, bits: int) -> int:
        return secrets.randbits(bits)

    def token_hex(self, size_bytes: int) -> str:
        return secrets.token_hex(size_bytes)


class Seeded:
    """The same draws for the same seed: for tests and simulation, never for secrets."""

    def __init__(self, seed: int) -> None:
        self._random = _random.Random(seed)

    def random(self) -> float:
        return self._random.random()

    def randbits(self, bits: int) -> int:
        return self._random.getrandbits(bits)

    def token_hex(self, size_bytes: int) -> str:
        return self._random.randbytes(size_bytes).hex()


system: Chance = SystemChance()


def random() -> float:
    """A float in [0, 1), from the system's source."""
    return system.random()


def randbits(bits: int) -> int:
    """A whole number in [0, 2**bits), from the system's source."""
    return system.randbits(bits)


def token_hex(size_bytes: int) -> str:
    """`size_bytes` random bytes as hexadecimal digits, from the system's source."""
    return system.token_hex(size_bytes)
