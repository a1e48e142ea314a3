"""What the node owes: notes of bytes and deletes that the backend has not heard of.

Theory. A note stands beside the record of a dirty object (or alone, for a delete) from the acknowledgement to the end
of its flush. It says what the flush must know after a restart: which version of the backend's the write was based on,
since when it waits, and how far an upload is. Where it stands says how durable it is: in the synced index, or in the
unsynced one (docs/design/0003-writing.md).

Invariant. `seq` grows with every write of a node, so of two notes of one key the higher one is the later write.
"""

from __future__ import annotations

import msgspec

from forebay.core.types import Headers


class Note(msgspec.Struct, array_like=True, frozen=True):
    """One object or delete that is owed to the backend, or (`local`) a local object.

    `based_on`: the backend's version before the first dirty write: "" for none, None for any. `object_id` is the
    record's; 0 for a delete. `upload_id` and `part_bytes`: a multipart flush that was begun.
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

    @property
    def is_delete(self) -> bool:
        return self.object_id == 0


class Owed(msgspec.Struct, frozen=True):
    """A note and whose it is. `durable`: it is in the synced index."""

    bucket: str
    key: str
    note: Note
    durable: bool


encode_note = msgspec.msgpack.Encoder().encode
decode_note = msgspec.msgpack.Decoder(Note).decode
