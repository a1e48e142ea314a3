"""The doors through which the product meets a simulated world: time, chance, threads, and its log.

Invariant. Outside of `open_doors` nothing is different.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from forebay.core.errors import ForebayError, Unavailable
from forebay.ports import chance, clock, threads
from forebay.sim.loop import Killed, VirtualClock

Patch = tuple[Any, str, Any]  # of a module or class: what is called so there, and what it shall be


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Each is in place as long as this lasts: how doors open, and how bugs are planted."""
    patches = list(patches)
    kept = [(where, name, vars(where)[name]) for where, name, _ in patches]
    for where, name, replacement in patches:
        setattr(where, name, replacement)
    try:
        yield
    finally:
        for where, name, original in kept:
            setattr(where, name, original)


@contextmanager
def open_doors(virtual: VirtualClock, chances: chance.Seeded, pools: threads.Threads, ear: Listener) -> Iterator[None]:
    """Time, chance, threads and the log are the world's."""
    replaced: list[Patch] = [
        (clock.SystemClock, "wall_s", staticmethod(virtual.wall_s)),
        (clock.SystemClock, "monotonic_s", staticmethod(virtual.monotonic_s)),
        (clock.BoottimeClock, "monotonic_s", staticmethod(virtual.monotonic_s)),
        *((chance.SystemChance, n, staticmethod(getattr(chances, n))) for n in ("random", "randbits")),
        (chance.SystemChance, "token_hex", staticmethod(chances.token_hex)),
        (threads, "system", pools),
        (asyncio, "run_coroutine_threadsafe", _refused),
    ]
    logger = logging.getLogger()
    handlers, logger.handlers = logger.handlers, [ear]
    try:
        with patched(replaced):
            yield
    finally:
        logger.handlers = handlers


def empty(graves: list[Any]) -> None:
    """Let Python get rid of what never ended. What that does and says is nobody's."""
    kept, sys.unraisablehook = sys.unraisablehook, lambda told: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that were about to begin
        graves.clear()
        gc.collect()
    sys.unraisablehook = kept


class Listener(logging.Handler):
    """What a node logs is told; an error that it does not know is a finding. `root` is left out of what is told."""

    def __init__(
        self, root: str, is_dead: Callable[[], bool], told: Callable[[str], None], found: Callable[[str], None]
    ) -> None:
        super().__init__(logging.WARNING)
        self._root, self._is_dead, self._told, self._found = root, is_dead, told, found

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if self._is_dead() or record.name.startswith("asyncio"):
            return
        text = record.getMessage().replace(self._root, "")
        self._told(f"{record.levelname} {text}")
        if error is not None and not isinstance(error, ForebayError | OSError | Killed):
            self._found(f"{text}: {error!r}")


def _refused(work: Any, loop: Any) -> Any:
    """A thread would wait for the loop here, and there is only one: what comes of far shards is not simulated."""
    work.close()
    raise Unavailable("not in a simulated world")
