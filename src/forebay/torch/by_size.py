"""Batches of at most so many bytes, for samples of uneven length; and packing their tokens into one row.

Theory. The order stays what it is, and a step still takes the next positions of it; only how many is decided by the
sizes of the samples, which the listing and the shards' layouts say before anything is read. Each rank in turn takes
samples while they fit. So the state is the same number of consumed samples, and a job goes on exactly on other ranks,
with another limit, or without one.

All ranks cut all batches of a step, which costs a search for each, so nobody has to be told. At the end of an epoch the
batches that there are may be fewer than ranks: then the longest are halved, and ranks that still have none take a
sample from the epoch's start, as in `partition`.

Invariants. (1) The runs of a step are neighbours in the order, none is empty, and none has more than the limit unless
it is one sample. (2) What is cut depends on the sizes from there on, the limits and the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from forebay.core.errors import Invalid
from forebay.torch.partition import Last

Run = tuple[int, int]  # positions from .. to


def greedy(sizes: Any, batch: int, batch_bytes: int, world: int) -> list[Run]:
    """Runs of at most `batch` samples and `batch_bytes` bytes (of one sample at least), at most `world`."""
    ends = np.cumsum(sizes)
    runs: list[Run] = []
    start = 0
    while len(runs) < world and start < len(ends):
        before = int(ends[start - 1]) if start else 0
        fits = int(np.searchsorted(ends, before + batch_bytes, "right"))
        end = min(max(fits, start + 1), start + batch, len(ends))
        runs.append((start, end))
        start = end
    return runs


def step(sizes: Any, batch: int, batch_bytes: int, world: int, last: Last, again: Any) -> list[Run]:
    """The run of each rank in the next step, where `sizes` are those of the samples that are left, or of as many as a
    step can take; empty if there is no step. `again` are the sizes at the epoch's start: positions past the end."""
    runs = greedy(sizes, batch, batch_bytes, world)
    if len(runs) == world or not runs:
        return runs
    if last == "drop":
        return []
    if last == "fill":
        more: Any = np.resize(again, batch * world)
        return greedy(np.concatenate((sizes, more)), batch, batch_bytes, world)
    while len(runs) < world:
        longest = max(range(len(runs)), key=lambda at: (runs[at][1] - runs[at][0], -at))
        start, end = runs[longest]
        if end - start == 1:
            break
        middle = (start + end + 1) // 2
        runs[longest : longest + 1] = [(start, middle), (middle, end)]
    left = len(sizes)
    return runs + [(left + n, left + n + 1) for n in range(world - len(runs))]


def packed(samples: Sequence[Any], window: int | None = None, fill: int = 0) -> dict[str, Any]:
    """A collation of sequences of tokens to one row without padding between them.

    `tokens` is all of them; `starts` (int32) where each begins, and at last where the row ends, as variable-length
    attention takes it; `positions` each token's place in its sequence. With `window` all rows are that long: what is
    left is `fill`, a sequence of its own. `Invalid` if there is more.
    """
    rows = [torch.as_tensor(sample) for sample in samples]
    if any(row.dim() != 1 for row in rows):
        raise Invalid("packed() takes sequences of tokens: tensors or arrays of one dimension")
    tokens = torch.cat(rows)
    lengths = [len(row) for row in rows]
    if window is not None:
        left = window - len(tokens)
        if left < 0:
            raise Invalid(f"{len(tokens)} tokens do not fit a window of {window}: take a smaller batch_bytes=")
        if left:
            tokens = torch.cat((tokens, tokens.new_full((left,), fill)))
            lengths.append(left)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.arange(len(tokens)) - torch.repeat_interleave(starts[:-1], torch.tensor(lengths))
    return {"tokens": tokens, "starts": starts.to(torch.int32), "positions": positions}
