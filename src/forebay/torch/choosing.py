"""Chooses how an epoch is shuffled where the user does not say: over all samples, or within windows that fit the node.

Theory. If the node, or the cluster that it is in, holds all of the data, a shuffle over all samples costs the bucket
nothing from the second epoch on. If it does not, most samples of such an epoch come from the bucket one by one; in
windows of a quarter of what the node can hold, whole blocks come once, ahead of their use.

The order must be the same for all ranks, and they may stand on machines whose nodes differ. So what one rank chooses is
written to the store that torch.distributed began with, and the first one counts; without that store several ranks
shuffle over all samples. A saved state says what was chosen, and a job that resumes goes on like that.

Invariant. All ranks of a job that read the same data get the same answer.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import distributed

from forebay.core import limits
from forebay.torch.dataset import Dataset

WINDOWS_KEPT = 4  # the one that is read, the two after it, and as much for what else there is
_WINDOW_BYTES_MIN = limits.MIB
log = logging.getLogger("forebay.torch")
_said: set[str] = set()


def chosen_window(dataset: Dataset, window_bytes: int, world: int, *, quietly: bool = False) -> int:
    """How large windows should be, at most `window_bytes`; 0: shuffle over all samples."""
    size_bytes, held_bytes = dataset.listing.size_bytes, dataset.room_bytes(cluster=True)
    fits = held_bytes is None or size_bytes <= held_bytes
    mine = 0 if fits else window_for(size_bytes, dataset.room_bytes(), window_bytes)
    found = mine if world == 1 else agreed(f"{dataset.fingerprint.id}/{window_bytes}", mine)
    if (mine or found) and not quietly and dataset.place not in _said:
        _said.add(dataset.place)
        what = f"in windows of {found / 1e9:.3g} GB (shuffle='block')" if found else "over all samples all the same"
        log.warning(
            "%s is %.3g GB, more than %s can hold: it is shuffled %s; say shuffle= to choose",
            dataset.place, size_bytes / 1e9, "the node" if held_bytes == dataset.room_bytes() else "the cluster", what,
        )  # fmt: skip
    return found


def window_for(size_bytes: int, room_bytes: int | None, window_bytes: int) -> int:
    """A power of two, so that a little more or less room makes no other order; 0 if the data fits, or nobody knows."""
    if room_bytes is None or size_bytes <= room_bytes:
        return 0
    fits = max(_WINDOW_BYTES_MIN, room_bytes // WINDOWS_KEPT)
    return min(window_bytes, 1 << (fits.bit_length() - 1))


def agreed(about: str, mine: int) -> int:
    """What the first rank of the job said, or 0 if ranks cannot speak with each other."""
    store = _store()
    return 0 if store is None else int(store.compare_set(f"forebay/window/{about}", "", str(mine)))


def _store() -> Any:
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    try:
        return distributed.distributed_c10d._get_default_store()
    except Exception:  # torch's own, without a public name: of another release it may be elsewhere
        return None
