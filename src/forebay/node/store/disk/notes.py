"""What the node owes: notes of bytes and deletes that the backend does not have yet.

Theory. A note stands beside the record of a dirty object (or alone, for a delete) from the acknowledgement to the end
of its flush. It holds what the flush must know after a restart: the backend's version that the write was based on,
since when it waits, and how far an upload is. Its place decides its durability: the synced index, or the unsynced one
(docs/design/0003-writing.md).

A backend's answer may be lost (the process is killed during a put), and the next write of the key may come before
anybody noticed. Then the backend has a version that nobody noted, and it is ours. So a note has the *digest* of its
body, and `succeeding` passes on the digests of earlier bodies that may have been sent (`core/machines/sent_bodies.py`).
The backend's object is compared with them before it counts as a conflict. That a body leaves is not recorded: any note
found at a start may have been sent, and its successor says so durably. The flusher, which knows what it sent, drops
from memory what never left.

Invariant. `seq` grows with every write of a node, so of two notes of one key the higher one is the later write.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import xxhash

from forebay.core import limits
from forebay.core.machines import sent_bodies
from forebay.core.machines.sent_bodies import Sent
from forebay.core.types import Headers

_ONE = struct.Struct("<QQ")


class Note(msgspec.Struct, array_like=True, frozen=True):
    """One object or delete that is owed to the backend, or (`local`) a local object.

    `since_s`: when the key became dirty (Unix time). `based_on`: the backend's version before the first dirty write: ""
    for none, None for any. `object_id` is the record's; 0 for a delete. `upload_id` and `part_bytes`: a multipart flush
    that began, of the key `upload_key` ("": the object's own). `digest`: `digest_of` the body ("" if unknown). `tried`
    and `late`: of earlier bodies, as in `core/machines/sent_bodies.py`. `stale`: (key, id) of uploads to abort.
    `copied`: of a copy that is kept for another node, what goes with it (`core/messages/copied.py`). For a key that
    owes a note already, make the new note with `succeeding`.
    """

    seq: int
    since_s: float
    size_bytes: int
    object_id: int
    based_on: str | None = None
    headers: Headers = ()
    tags: str = ""
    md5: str = ""
    upload_id: str = ""
    part_bytes: int = 0
    local: bool = False
    digest: str = ""
    tried: tuple[str, ...] = ()
    stale: tuple[tuple[str, str], ...] = ()
    upload_key: str = ""
    late: tuple[tuple[str, float], ...] = ()
    copied: bytes = b""

    @property
    def sent(self) -> Sent:
        """Earlier bodies that may have been sent."""
        return Sent(self.tried, self.late)

    @property
    def known_by(self) -> str | None:
        """The digest that identifies this body or delete once it was sent; None if there is none."""
        return sent_bodies.ABSENT if self.is_delete else self.digest or None

    @property
    def is_delete(self) -> bool:
        return self.object_id == 0


def digest_of(size_bytes: int, *, sums: Sequence[int] = (), body: bytes | None = None) -> str:
    """A digest that tells bodies apart: of the size and the xxh3-64 of each block, or of the bytes themselves."""
    if body is not None:
        block = limits.BLOCK_BYTES
        if 0 < len(body) <= block:
            return xxhash.xxh3_128_hexdigest(_ONE.pack(size_bytes, xxhash.xxh3_64_intdigest(body) or 1))
        sums = [xxhash.xxh3_64_intdigest(body[at : at + block]) for at in range(0, len(body), block)]
    packed = struct.pack(f"<Q{len(sums)}Q", size_bytes, *(each or 1 for each in sums))  # 0 is stored as 1: files.py
    return str(xxhash.xxh3_128_hexdigest(packed))


class BlockDigest:
    """`digest_of` a body that comes in pieces."""

    def __init__(self) -> None:
        self._size_bytes = 0
        self._sums: list[int] = []
        self._block, self._filled = xxhash.xxh3_64(), 0

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._size_bytes += len(view)
        while view:
            part = view[: limits.BLOCK_BYTES - self._filled]
            self._block.update(part)
            self._filled, view = self._filled + len(part), view[len(part) :]
            if self._filled == limits.BLOCK_BYTES:
                self._sums.append(self._block.intdigest())
                self._block, self._filled = xxhash.xxh3_64(), 0

    def hexdigest(self) -> str:
        last = [self._block.intdigest()] if self._filled else []
        return digest_of(self._size_bytes, sums=[*self._sums, *last])


def succeeding(note: Note, before: Note | None, *, left: bool = True) -> Note:
    """`note`, of a write to a key that owed `before`: with the earlier waiting time and base version, and with the
    bodies that may have been sent before it, including that of `before` unless it never `left`. Without `before`, or if
    one of them is local, `note` as it is."""
    if before is None or before.local or note.local or before.seq == note.seq:
        return note
    sent = sent_bodies.left(before.sent, before.known_by) if left else before.sent
    stale = before.stale
    if before.upload_id:
        stale = (*stale, (before.upload_key, before.upload_id))
    return msgspec.structs.replace(
        note,
        since_s=min(note.since_s, before.since_s),
        based_on=before.based_on,
        stale=tuple(dict.fromkeys((*note.stale, *stale))),
        **sent._asdict(),
    )


class Owed(msgspec.Struct, frozen=True):
    """A note with its bucket and key. `durable`: it is in the synced index."""

    bucket: str
    key: str
    note: Note
    durable: bool
