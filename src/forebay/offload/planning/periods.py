"""The periods in which tensors wait, on the circle of a trace's operators.

Theory. A period lies between two consecutive uses of a tensor. Operators are counted on from lap to lap (`N + k` is
operator k of the next step), so a period around the end of the step is like any other. Its memory is free from the
first point after the use before it (`leave`) until the use behind it (`need`), less the time of the moves. A period is
`clean` if the tensor was not written in the use before it, nor since the previous period: then an earlier copy is still
good. `writes_before` counts the writes between.

Invariant. A tensor's periods come in the order of their beginnings, and each begins in the first lap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forebay.offload.planning.trace import KINDS, Flags, Ints, Trace


@dataclass(frozen=True)
class Periods:
    """Columns, one row for each period that has an operator in it: its tensor, its use before (`last_use`), the first
    point after that (`leave`), the use behind it (`need`); and whether the use before it, or any since the period
    before this one, wrote (`written`)."""

    tensors: Ints
    last_uses: Ints
    leaves: Ints
    needs: Ints
    written: Flags

    def __len__(self) -> int:
        return len(self.tensors)


def inactive(trace: Trace, size_bytes_min: int) -> Periods:
    """The periods of all tensors of at least that size, but for temporary ones: nobody could move those."""
    count = trace.operator_count
    users, uses = trace.users(), trace.use_operators
    ends = trace.use_ends
    first = np.concatenate([[0], ends[:-1]])
    following = np.empty_like(uses)
    following[:-1] = uses[1:]
    following[ends - 1] = uses[first] + count  # round the end, for those that stay
    lasts: Flags = np.zeros(len(uses), bool)
    lasts[ends - 1] = True
    leaves = next_point(trace, uses + 1)
    movable = (trace.sizes_bytes >= size_bytes_min) & (trace.kinds != KINDS.index("temporary"))
    kept = movable[users] & (leaves < following)
    kept &= ~lasts | trace.persistent[users]
    rows = np.flatnonzero(kept)
    # the writes up to and with each use, so that a difference tells of those between two periods
    before = np.cumsum(trace.use_writes)
    owners = users[rows]
    earlier = np.concatenate([[-1], rows[:-1]])
    same = np.concatenate([[False], owners[1:] == owners[:-1]]) if len(rows) else np.zeros(0, bool)
    start = np.where(same, earlier, first[owners] - 1)
    written = (before[rows] - np.where(start >= 0, before[start], 0)) > 0
    # the first period of a tensor follows its last one, in the step before: what was written after that counts too
    heads = np.flatnonzero(~same)
    tails = np.concatenate([heads[1:] - 1, [len(rows) - 1]]) if len(rows) else heads
    after = before[ends[owners[heads]] - 1] - before[rows[tails]]
    written[heads] |= (after > 0) | ~trace.persistent[owners[heads]]
    return Periods(owners, uses[rows], leaves[rows], following[rows], written)


def next_point(trace: Trace, operators: Ints) -> Ints:
    """The first point at or after each operator: where the engine can act, counted on over laps."""
    points = np.unique(trace.points[trace.points < trace.operator_count])
    laps, inner = np.divmod(operators, trace.operator_count)
    at = np.searchsorted(points, inner)
    wrapped = at == len(points)
    return np.where(wrapped, trace.operator_count, points[np.where(wrapped, 0, at)]) + laps * trace.operator_count


def last_point(trace: Trace, operators: Ints) -> Ints:
    """The last point at or before each operator, counted on over laps."""
    points = np.unique(trace.points[trace.points < trace.operator_count])
    laps, inner = np.divmod(operators, trace.operator_count)
    found: Ints = points[np.searchsorted(points, inner, "right") - 1] + laps * trace.operator_count
    return found
