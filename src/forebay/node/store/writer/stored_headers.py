"""New stored headers for an object that keeps its bytes: how the store changes tags.

Theory. An object's headers are in up to four places: its record in view; the header of its data file (for a rebuild);
and for an owned object its entry in the durable index, with the note that the flush uses. All are rewritten, the bytes
are not. As with other writes, `plan` decides on the loop's thread, `keep` does what waits for a disk in any thread, and
`show` makes the outcome visible on the loop's thread. The caller holds the key's lock from first to last.

The durable entry is written before the record in view: a stop between the two leaves the new headers, acknowledged or
not. Only the head of the record in view is replaced, since a reader's touch or an eviction may have changed the rest of
it meanwhile. If a file's header cannot be written, a rebuild loses the headers of a clean object, which its backend
has.

Rejected: a new object with the same bytes (a copy, or two names for one file, whose header can name one object).

Invariant. An owned object's note in the durable index and its record there have the same headers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from forebay.core.errors import Corrupt, NotFound
from forebay.core.record import Record, State, build_head
from forebay.core.s3rules.tags import with_tags
from forebay.core.types import Headers, ObjectInfo
from forebay.node.store.disk import files, keys, ledger
from forebay.node.store.disk.durable import Entry
from forebay.node.store.disk.notes import Note, Owed
from forebay.node.store.disk.volume import Volume, stalled
from forebay.node.store.writer.volumes import VolumeSet

log = logging.getLogger("forebay.store")


class Tagged(NamedTuple):
    """An object's new tags on their way."""

    volume: Volume
    entry: bytes
    info: ObjectInfo
    bucket: str
    object_id: int
    inline: bool
    note: Note | None  # of an owned object, as it will be
    kept: Entry | None  # in the durable index, as it will be


class Headings:
    """For `Store`. `put` replaces a record in view."""

    def __init__(
        self,
        volumes: VolumeSet,
        *,
        put: Callable[[Volume, str, str, Record, Record | None], None],
    ) -> None:
        self._volumes = volumes
        self._put = put

    def plan(self, bucket: str, info: ObjectInfo, record: Record, tags: str, owes: Note | None) -> Tagged:
        """Decide how the object `record` (described by `info`) gets these tags. `owes` is its new note if it is to be
        flushed. `Unavailable` when its volume is out, `NotFound` if the key has another object by now."""
        volume = self._volumes.home(bucket, info.key)
        if volume.state == "out":
            raise self._volumes.unusable(volume)
        if volume.stall.stalled:
            raise stalled(volume.path, f"{bucket}/{info.key}")
        entry = keys.index_key(bucket, info.key)
        now = volume.record(entry, info.key)
        if now is None or now.object_id != record.object_id:
            raise NotFound("the object was replaced or dropped meanwhile: look it up again", code="NoSuchKey")
        tagged = msgspec.structs.replace(info, headers=with_tags(info.headers, tags))
        note, kept = None, None
        if now.state & State.OWNED:
            try:
                there = volume.durable.get(entry)
            except (OSError, Corrupt) as error:
                raise volume.trouble(error, "reading the durable index") from error
            before = there or ledger.note_of(volume, entry)
            assert before is not None, "an owned record has its note"
            note = owes if owes is not None else msgspec.structs.replace(before.note, tags=tags)
            if there is not None and there.record is not None:
                kept = msgspec.structs.replace(
                    there, note=note, record=msgspec.structs.replace(there.record, head=build_head(tagged))
                )
        return Tagged(volume, entry, tagged, bucket, record.object_id, record.inline is not None, note, kept)

    def keep(self, tagged: Tagged) -> None:
        """Write the durable entry, then the header of the file. Any thread. `Unavailable` if the durable entry cannot
        be written; nothing was changed then."""
        volume = tagged.volume
        if tagged.kept is not None:
            try:
                volume.durable.commit({tagged.entry: tagged.kept})
            except (OSError, Corrupt) as error:
                raise volume.trouble(error, "committing to the durable index") from error
        if not tagged.inline:
            self._rename(volume, tagged.object_id, tagged.info.headers)

    def _rename(self, volume: Volume, object_id: int, headers: Headers) -> None:
        try:
            with volume.headers:
                header = files.Header.read(volume.data_path(object_id))
                if header is not None:
                    header.rename_to(msgspec.structs.replace(header.identity, headers=headers))
        except OSError as error:
            log.info("the header of object %d keeps its old tags: %s", object_id, error)

    def show(self, tagged: Tagged) -> Owed | None:
        """Put it into view with the next flush; return what the object owes now, if it is to be flushed."""
        volume, key = tagged.volume, tagged.info.key
        now = volume.record(tagged.entry, key)
        if now is not None and now.object_id == tagged.object_id:
            head = build_head(tagged.info)
            self._put(volume, tagged.bucket, key, msgspec.structs.replace(now, head=head), now)
        note = tagged.note
        if note is None:
            return None
        if tagged.kept is None:
            long_key = keys.record_key(tagged.bucket, key)
            ledger.put_note(volume, tagged.entry, Entry(note, None, 0, long_key))
        return None if note.local else Owed(tagged.bucket, key, note, tagged.kept is not None)
