"""A node small enough that every size class of object costs next to nothing to move.

Theory. What the node does with an object depends on where its size lies between a few bounds: inline or a file, one
block or many, streamed, uploaded in parts. `limits.py` has them. Divided by about 256 they keep their order, and a
world of a hundred small objects meets every class. Bounds are read when modules are imported, so this is called before
any module of the node is.

Invariant. No module that reads a bound was imported before.
"""

from __future__ import annotations

import sys

from forebay.core import limits

KIB = limits.KIB
SCALED = {
    "BLOCK_BYTES": 16 * KIB,
    "STRIPE_BYTES": 256 * KIB,
    "RELAY_BYTES_MIN": 4 * KIB,
    "INLINE_BYTES_MAX": KIB,
    "ETAG_MD5_BYTES_MAX": 4 * KIB,
    "PART_BYTES_MIN": 20 * KIB,
    "STREAM_BYTES_MIN": 16 * KIB,
    "MULTIPART_BYTES_MIN": 64 * KIB,
    "FLUSH_PART_BYTES": 32 * KIB,
    "READ_WINDOW_BYTES": 64 * KIB,
    "PASS_BYTES_MAX": 512 * KIB,
    "PASS_UNIT_BYTES": 4 * KIB,
    "PASS_AHEAD_BYTES_MAX": 256 * KIB,
    "RESERVE_BYTES_MAX": 64 * KIB,
}


def scale() -> None:
    """Make the bounds small in this process, for good. Twice is fine."""
    if SCALED["BLOCK_BYTES"] == limits.BLOCK_BYTES:
        return
    early = [name for name in sys.modules if name.startswith(("forebay.node", "forebay.core.record"))]
    assert not early, f"{early[0]} was imported before the bounds were scaled"
    for name, value in SCALED.items():
        setattr(limits, name, value)
    from forebay.node.engine.read import openings, sink
    from forebay.node.engine.write import writes
    from forebay.node.front.http import long_bodies
    from forebay.node.store.disk import journal, volume_threads

    for module, name, size in (
        (openings, "FIRST_BYTES", 48 * KIB),
        (sink, "GATHERED_BYTES_MAX", 16 * KIB),
        (sink, "HELD_BYTES_MAX", KIB),
        (writes, "PRESYNC_BYTES_MIN", 8 * KIB),
        (long_bodies, "PIECE_BYTES", 72 * KIB),
        (journal, "GENERATION_BYTES", 128 * KIB),
        (journal, "PROVIDED_BYTES_MIN", 16 * KIB),
    ):
        assert isinstance(vars(module)[name], int), name
        setattr(module, name, size)
    assert volume_threads.CALL_S > 0
