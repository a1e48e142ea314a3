"""The position of a job in its data: five values, whatever the number of ranks and workers.

Theory. The order is computed from (seed, epoch, index). So the state is how many samples of which epoch the whole job
has consumed, and of which dataset. World size, workers, batch size and prefetched batches are not in it: a run that
resumes with others goes on with the same remaining samples in the same order.

For an order of windows (`order.Windows`), the state also names the window, so nobody has to count what lies before it.
The order alone decides that place, like all the rest.

Invariants. (1) As JSON it is less than STATE_BYTES_MAX. (2) `samples` is less than the epoch's samples, or both are 0:
an epoch that is over is saved as the start of the next. (3) `before` is at most `samples`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from forebay.core.errors import Invalid, Precondition
from forebay.torch.columns import Fingerprint, ListingColumns

VERSION = 1
STATE_BYTES_MAX = 1024


class State(msgspec.Struct, frozen=True):
    """`samples` of epoch `epoch` are consumed by the whole job; the next one is of window `window` of the epoch's
    order, before which there are `before`."""

    version: int
    seed: int
    epoch: int
    samples: int
    fingerprint: Fingerprint
    window: int = 0
    before: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `json` or a checkpoint."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def from_dict(
    state: dict[str, Any], listing: ListingColumns, now: Fingerprint, told: Callable[[str], str] = lambda listing: ""
) -> State:
    """The state in `state`, if it is one of the dataset that is `now`. `told` is asked what the node knows of changes
    since a listing.

    `Invalid` if it is no state of this kind; `Precondition`, saying what changed, if the dataset is another one now.
    """
    try:
        loaded = msgspec.convert(state, State)
    except msgspec.ValidationError as error:
        raise Invalid(f"this is no state of a forebay loader ({error}): pass what state_dict() returned") from None
    if loaded.version != VERSION:
        raise Invalid(
            f"the state has version {loaded.version} and this Forebay reads version {VERSION}: use the release that "
            "saved it, or begin the epoch again with set_epoch()"
        )
    changed = listing.difference(loaded.fingerprint, now)
    if changed:
        more = told(loaded.fingerprint.listing_id) if loaded.fingerprint.id != now.id else ""
        changed += f"; {more}" if more else ""
        raise Precondition(
            f"the dataset is not the one of the saved state ({changed}), so its order would be another: restore the "
            f"data, or begin an epoch of the new data with set_epoch({loaded.epoch + 1})"
        )
    most = now.samples or loaded.samples  # 0: not known yet
    if not 0 <= loaded.before <= loaded.samples <= most or loaded.epoch < 0 or loaded.window < 0:
        raise Invalid(f"the state says {loaded.samples} of {now.samples or 'some'} samples: it is damaged")
    return loaded
