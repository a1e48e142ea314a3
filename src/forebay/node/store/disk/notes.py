"""What the node owes: notes of bytes and deletes that the backend has not heard of.

Theory. A note stands beside the record of a dirty object (or alone, for a delete) from the acknowledgement to the end
of its flush. It says what the flush must know after a restart: which version of the backend's the write was based on,
since when it waits, and how far an upload is. Where it stands says how durable it is: in the synced index, or in the
unsynced one (docs/design/0003-writing.md).

An answer of the backend may be lost (the process is killed while a put is under way), and the next write of the key may
come before anybody noticed. The backend then has a version that nobody noted, and it is ours. So a note names the
*digest* of its body, and `succeeding` hands on those of the bodies before it that may have been sent
(`core/machines/sent_bodies.py`): what the backend has is compared with them before it is called a conflict. That a body
leaves is not written down: a note that is found at a start may have been sent, and whoever replaces one says so of it
durably; the flusher, which knows what it sent, forgets in memory what never left.

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
    that was begun, of the key `upload_key` ("": the object's own). `digest`: `digest_of` the body ("" where it is not
    known). `tried` and `late`: of earlier bodies, what `core/machines/sent_bodies.py` calls so. `stale`: (key, id) of
    uploads to abort. Whoever writes the note of a key that owes one already makes it with `succeeding`.
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

    @property
    def sent(self) -> Sent:
        """What may have been sent of earlier bodies."""
        return Sent(self.tried, self.late)

    @property
    def known_by(self) -> str | None:
        """What tells this body or delete, once it was sent; None where nothing does."""
        return sent_bodies.ABSENT if self.is_delete else self.digest or None

    @property
    def is_delete(self) -> bool:
        return self.object_id == 0


def digest_of(size_bytes: int, *, sums: Sequence[int] = (), body: bytes | None = None) -> str:
    """What tells one body from another: of its size and the xxh3-64 of each block, or of the bytes themselves."""
    if body is not None:
        block = limits.BLOCK_BYTES
        if 0 < len(body) <= block:
            return xxhash.xxh3_128_hexdigest(_ONE.pack(size_bytes, xxhash.xxh3_64_intdigest(body) or 1))
        sums = [xxhash.xxh3_64_intdigest(body[at : at + block]) for at in range(0, len(body), block)]
    packed = struct.pack(f"<Q{len(sums)}Q", size_bytes, *(each or 1 for each in sums))  # 0 is stored as 1: files.py
    return str(xxhash.xxh3_128_hexdigest(packed))


def succeeding(note: Note, before: Note | None, *, left: bool = True) -> Note:
    """`note`, of a write to a key that owed `before`: it goes on waiting since then, is based on the same version, and
    knows what may have been sent before it, the body of `before` included unless that never `left`. Without `before`,
    or with a local one, `note` as it is."""
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
    """A note and whose it is. `durable`: it is in the synced index."""

    bucket: str
    key: str
    note: Note
    durable: bool


encode_note = msgspec.msgpack.Encoder().encode
decode_note = msgspec.msgpack.Decoder(Note).decode
