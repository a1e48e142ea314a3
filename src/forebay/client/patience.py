"""Waits for a node that restarts, is busy, or is cut off: the one layer above the client that repeats a request.

Theory. A training job has hours, and a node that restarts is back in seconds. So what can succeed later is repeated,
with pauses that grow and that respect the node's own word (`retry_after_s`), until `patience_s` have passed. What
waiting does not mend is raised at once. The caller waits the pause itself, so that it can be woken, count the time,
or report it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from forebay.core.errors import Busy, Closed, ForebayError, Unavailable
from forebay.ports import clock

PAUSE_S, PAUSE_MAX_S = 0.05, 2.0
WAITED_FOR = (Unavailable, Busy, Closed)

T = TypeVar("T")


def with_patience(
    attempt: Callable[[], T], patience_s: float, pause: Callable[[float, ForebayError], None], advice: str
) -> T:
    """What `attempt` returns, tried until it does. `pause` waits as long as it is told, and hears of the error.

    `Unavailable`, ending with `advice`, when `patience_s` have passed; every error that waiting does not mend.
    """
    give_up_s = clock.monotonic_s() + patience_s
    pause_s = PAUSE_S
    while True:
        try:
            return attempt()
        except WAITED_FOR as error:
            left_s = give_up_s - clock.monotonic_s()
            if left_s <= 0:
                raise Unavailable(f"waited {patience_s:g} s in vain ({error}): {advice}") from error
            pause(min(max(pause_s, error.retry_after_s), left_s), error)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
