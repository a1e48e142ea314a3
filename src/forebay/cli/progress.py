"""A progress line with rate and remaining time, on terminals only.

Theory. Progress goes to standard error, so output stays clean, and only to a terminal. The caller sets how much is done
and how much there is; a thread draws ten times a second, whatever the caller does.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """Use with `with`. Without a terminal (or with `quiet`) every method does nothing."""

    def __init__(self, what: str, *, quiet: bool = False, has_rate: bool = True) -> None:
        self._bar: Any = None
        self._what = what
        self._has_rate = has_rate  # bytes that are only counted, not moved, have none
        self._on = not quiet and sys.stderr.isatty()

    def __enter__(self) -> Progress:
        if self._on:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                DownloadColumn(binary_units=True),
                *([TransferSpeedColumn()] if self._has_rate else []),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def at(self, done_bytes: float, total_bytes: float | None, what: str | None = None) -> None:
        """So much is done of so much (None: not known yet). Safe from several threads."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done_bytes, total=total_bytes, description=what or self._what)
