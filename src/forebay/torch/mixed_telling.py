"""Tells the node the future of a mixture, as one future for each of its datasets.

Theory. A node's hints are of one listing each, and it compares the needs of several jobs (`core/machines/hints.py`). So
each dataset of a mixture is a job of its own there. An access of the mixture says whose it is. A dataset's accesses are
numbered by themselves, so a position in the mixture is, for each dataset, how many of its accesses lie before it.

Invariants. (1) A dataset's accesses reach the node in the order of the mixture. (2) What is told anew from some access
on replaces what was told from there on, for each dataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from forebay.core.errors import ForebayError
from forebay.core.machines.hints import JOB_NAME_CHARS_MAX
from forebay.torch.columns import Column
from forebay.torch.dataset import Accesses
from forebay.torch.source import Telling

TOLD_MAX = 16  # datasets of a mixture: a node takes 64 jobs, of all trainers together


def name_of(job: str, source: int) -> str:
    """The name of the job of a mixture's dataset: the end of `job` stays, which tells loaders of one run apart."""
    end = f".{source}"
    return job[-(JOB_NAME_CHARS_MAX - len(end)) :] + end


def mixed(parts: Sequence[tuple[Column, int, Accesses]], count: int) -> Accesses:
    """The accesses of `count` samples; each part has its samples' places, its dataset's number and their accesses. To
    the columns come the dataset's number and how many bytes of a block are read on average."""
    rows: Column = np.zeros((count, 5), np.uint32)
    for places, source, accesses in parts:
        rows[places, :3], rows[places, 3], rows[places, 4] = accesses.rows, source, accesses.use_bytes
    return Accesses(rows, sum(accesses.size_bytes for _, _, accesses in parts))


class _Piece(NamedTuple):
    """Accesses that were told: whose each is."""

    start: int
    sources: Column


class MixedTelling:
    """A `Telling` for the accesses that `mixed` makes. `of` has one for each dataset; None is told nothing."""

    def __init__(self, of: Sequence[Telling | None]) -> None:
        self._of = of
        self._pieces: list[_Piece] = []  # one after another; what lies before was consumed
        self._before = [0] * len(of)  # accesses of each dataset before the first piece
        self._known = [0] * len(of)  # and how many of each the node was told
        self._said = [0] * len(of)  # and how many of each it knows to be consumed

    def future(self, accesses: Any, start: int | None = None, use_bytes: int = 0) -> None:
        """From access `start` on these are read. Errors are those of any of the datasets: tell it again."""
        known = self._pieces[-1].start + len(self._pieces[-1].sources) if self._pieces else 0
        start = known if start is None else start
        numbers = self._counts(start)
        sources = accesses[:, 3]
        for source, telling in enumerate(self._of):
            here = accesses[sources == source]
            if telling is None or not (len(here) or self._known[source] > numbers[source]):
                continue
            telling.future(np.ascontiguousarray(here[:, :3]), numbers[source], int(here[:, 4].max(initial=0)))
            self._known[source] = numbers[source] + len(here)
        self._cut(start)
        self._pieces.append(_Piece(start, sources.astype(np.uint16)))

    def at(self, position: int) -> None:
        """The accesses before `position` are consumed. Errors as of `future`."""
        self._before = self._counts(position)
        while self._pieces and position >= self._pieces[0].start + len(self._pieces[0].sources):
            self._pieces.pop(0)
        if self._pieces and position > self._pieces[0].start:
            first = self._pieces[0]
            self._pieces[0] = _Piece(position, first.sources[position - first.start :])
        for source, telling in enumerate(self._of):
            if telling is not None and self._said[source] < self._before[source]:
                telling.at(self._before[source])
                self._said[source] = self._before[source]

    def close(self) -> None:
        """The job is over, for all datasets; an error is raised when all were told."""
        failed: ForebayError | None = None
        for telling in self._of:
            try:
                if telling is not None:
                    telling.close()
            except ForebayError as error:
                failed = error
        if failed is not None:
            raise failed

    def _counts(self, position: int) -> list[int]:
        """How many accesses of each dataset lie before `position`."""
        found = np.asarray(self._before, np.int64)
        for piece in self._pieces:
            found = found + np.bincount(piece.sources[: max(0, position - piece.start)], minlength=len(found))
        return [int(count) for count in found]

    def _cut(self, start: int) -> None:
        """Forget whose the accesses from `start` on were."""
        pieces = [piece for piece in self._pieces if piece.start < start]
        if pieces:
            last = pieces.pop()
            pieces.append(_Piece(last.start, last.sources[: start - last.start]))
        self._pieces = pieces
