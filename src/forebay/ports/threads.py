"""Threads as a door: the only place that starts one, or waits for one.

Theory. Code that hands work to a thread asks here, so that the simulator can run that work itself, one piece at a time,
at moments that a seed decides. `disk` says which volume's disk (its path, or its id) the threads of a pool wait
for: one that stalls stops them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Protocol


class Started(Protocol):
    """Work in a thread of its own."""

    def join(self) -> None:
        """Block until it is done."""
        ...


class Threads(Protocol):
    """Where threads come from."""

    def pool(self, count: int, name: str, disk: str = "") -> Executor:
        """Up to `count` threads that share what is submitted, in order."""
        ...

    def wait(self, future: Future[Any], patience_s: float | None = None) -> bool:
        """Block until `future` is done, or `patience_s` have passed; whether it is done."""
        ...

    def start(self, work: Callable[..., None], *arguments: Any, name: str) -> Started:
        """Do `work` in a thread of its own."""
        ...


class SystemThreads:
    """The operating system's threads."""

    def pool(self, count: int, name: str, disk: str = "") -> Executor:
        return ThreadPoolExecutor(count, thread_name_prefix=name)

    def wait(self, future: Future[Any], patience_s: float | None = None) -> bool:
        try:
            future.exception(patience_s)
        except TimeoutError:
            return False
        return True

    def start(self, work: Callable[..., None], *arguments: Any, name: str) -> Started:
        thread = threading.Thread(target=work, args=arguments, name=name)
        thread.start()
        return thread


system: Threads = SystemThreads()


def pool(count: int, name: str, disk: str = "") -> Executor:
    """Up to `count` of the system's threads, which wait for the volume `disk`, if for any."""
    return system.pool(count, name, disk)


def wait(future: Future[Any], patience_s: float | None = None) -> bool:
    """Block until `future` is done, or `patience_s` have passed; whether it is done."""
    return system.wait(future, patience_s)


def start(work: Callable[..., None], *arguments: Any, name: str) -> Started:
    """Do `work` in a thread of its own."""
    return system.start(work, *arguments, name=name)
