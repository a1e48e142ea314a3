"""What `forebay volume give-up` says about a volume that is gone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from forebay.cli.volume import gone
from forebay.core.volumes import VolumeState

OWED = VolumeState("v1", "/disk", "missing", owed_buckets=["once", "twice"], owed_objects=2, owed_bytes=1 << 20)


@pytest.mark.parametrize(
    ("came_back", "lost_buckets", "says"),
    [
        (0, ["once", "twice"], "lost: 2 objects with 1.0 MiB, and perhaps deletes, in once, twice"),
        (2, [], "2 came back from other nodes, and nothing is lost"),
        (0, [], "other nodes have it, and nothing is lost"),
        (1, ["once"], "1 came back from other nodes, and lost is what only it had in once"),
    ],
)
def test_nothing_is_said_to_be_lost_that_other_nodes_have(came_back: int, lost_buckets: list[str], says: str) -> None:
    state = replace(OWED, came_back=came_back, lost_buckets=lost_buckets)
    assert gone(state).endswith(says)
