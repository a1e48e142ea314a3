"""Background scrub. Signatures settled; bodies follow."""

from __future__ import annotations

from forebay.core.errors import NotSupported
from forebay.node.store.writer import Store


class Scrubber:
    """Re-reads every block in index order, for ever, resuming where it was after a restart."""

    def __init__(self, store: Store, *, rate_bytes_s: float = 50e6) -> None:
        raise NotSupported("not written yet")

    def step(self, now_s: float) -> float:
        """Check the next block if its time has come; seconds until the next call is worth it. Blocks on disk reads."""
        raise NotSupported("not written yet")
