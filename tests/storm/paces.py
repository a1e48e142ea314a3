"""Waits of nodes that are as long as a storm, made short: what a node does after minutes or hours, it does in a round.

All are in proportion: what is nobody's is still left alone for more than twice as long as a writer may take.
"""

from __future__ import annotations

from forebay.backends.coded import backend
from forebay.node.engine import slices

STALE_S = 8.0
LEAVING_TIDY_S = 2.0
GRACE_S = 2.0  # else what was replaced fills the small disks of a storm


def quicken() -> None:
    """Do so in this process, for good."""
    for module, name, value in (
        (backend, "STALE_S", STALE_S),
        (backend, "GRACE_S", GRACE_S),
        (slices, "LEAVING_TIDY_S", LEAVING_TIDY_S),
        (slices, "LEAVING_TIDY_AFTER_S", 2.5 * STALE_S),
        (slices, "TIDY_S", 5 * LEAVING_TIDY_S),
        (slices, "TIDY_AFTER_S", 2.5 * STALE_S),
        (slices, "SILENT_FACTOR", 1),
        (slices, "SETTLED_S", 10.0),
        (slices, "CHECK_S", 10.0),
    ):
        assert isinstance(vars(module)[name], int | float), name
        setattr(module, name, value)
