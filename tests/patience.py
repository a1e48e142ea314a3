"""How long a test waits for what has to come about: until it has, or until nobody can call the machine merely busy.

A test waits for a condition, never for a time. The end is there only so that a hang becomes a failure; it is late
(`PATIENCE_S`), because a machine whose cores are all taken may run a process for some milliseconds of each second, and
it costs nothing where the condition comes about.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 90.0
LOOK_S = 0.005  # between looks


def until(condition: Callable[[], Any], what: str = "what is waited for", timeout_s: float = PATIENCE_S) -> Any:
    """Wait until `condition()` is true, and return what it was."""
    give_up_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < give_up_s, f"{what} did not come about within {timeout_s} s"
        time.sleep(LOOK_S)
    return found


async def until_async(
    condition: Callable[[], Any], what: str = "what is waited for", timeout_s: float = PATIENCE_S
) -> Any:
    """The same beside other tasks of a loop."""
    give_up_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < give_up_s, f"{what} did not come about within {timeout_s} s"
        await asyncio.sleep(LOOK_S)
    return found
