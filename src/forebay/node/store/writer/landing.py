"""An object whose blocks are landing in a data file.

Theory. Bytes go to their place in the file as they arrive. A block counts only when it is whole and its checksum is
stored: first in the file's header and then in the index, with the record that lists it. Several readers may land the
same version at once: they share one landing, which ends with the last of them.

A landing can lose its object: another version begins, or the object is dropped whole. It is then *gone*: readers who
know the file's path may still read from it, but nothing more is listed.

Invariants. (1) A landing lists only the object that it was made for. (2) A landing that closes without a listed block
leaves no file. (3) A block being written is never punched.
"""

from __future__ import annotations

import os
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from forebay.core.record import Record
from forebay.core.types import ObjectInfo
from forebay.node.store.disk import files
from forebay.node.store.disk.volume import Volume

if TYPE_CHECKING:
    from forebay.node.store.writer.writer import Store

_PIECES_MAX = os.sysconf("SC_IOV_MAX")  # of one write


class Landing:
    """Made by `Store.begin`; call `close()` as often as `begin` returned it.

    Fronts may read landed bytes from `path`, at their natural offsets, from the start to long after `close`.
    """

    __slots__ = (
        "_fd",
        "_header",
        "_kept",
        "_partial",
        "_store",
        "_uses",
        "block_bytes",
        "bucket",
        "checked_s",
        "gone",
        "info",
        "object_id",
        "path",
        "pinned",
        "volume",
    )

    def __init__(
        self,
        store: Store,
        volume: Volume,
        bucket: str,
        info: ObjectInfo,
        fd: int,
        header: files.Header,
        *,
        checked_s: float,
        pinned: bool,
    ) -> None:
        self._store = store
        self._fd = fd
        self._header = header
        self._partial: set[int] = set()
        self._kept: dict[int, int] = {}  # checksums in the header, of blocks that are not listed yet
        self._uses = 1
        self.volume = volume
        self.bucket = bucket
        self.info = info
        self.object_id = header.identity.object_id
        self.path = header.path
        self.block_bytes = header.identity.block_bytes
        self.checked_s = checked_s
        self.pinned = pinned
        self.gone = False

    @property
    def record(self) -> Record | None:
        """The object's record, pending changes included; None while no block is whole, and once the landing is gone."""
        record = self._store.lookup(self.bucket, self.info.key) if not self.gone else None
        return record if record is not None and record.object_id == self.object_id else None

    def write(self, offset: int, *pieces: bytes | memoryview) -> None:
        """Write the pieces in order, from `offset` on. Releases the GIL; any thread. `Unavailable` when the disk is
        full or failing."""
        end = offset + sum(map(len, pieces))
        assert 0 <= offset <= end <= self.info.size_bytes, (offset, end, self.info)
        for block in range(offset // self.block_bytes, -(-end // self.block_bytes)):
            if block not in self._partial:
                self._partial.add(block)
                self._store.before_write(self.path, block)
        if self.volume.state == "out":
            raise self._store.unusable(self.volume)
        left = deque(pieces)
        try:
            while left:
                written = os.pwritev(self._fd, list(islice(left, _PIECES_MAX)), offset)
                offset += written
                while left and written >= len(left[0]):
                    written -= len(left.popleft())
                if written:
                    left[0] = memoryview(left[0])[written:]
        except OSError as error:
            raise self.volume.trouble(error, "writing a data file") from error

    def keep_sums(self, whole: list[tuple[int, int]]) -> None:
        """These blocks are whole, with these checksums: store them in the file's header. Any thread. `finish_block`
        does it for callers that do not. `Unavailable`."""
        if not whole or self.gone:
            return
        try:
            with self.volume.headers:
                self._header.set_sums({block: files.stored_sum(xxh3) for block, xxh3 in whole})
        except OSError as error:
            raise self.volume.trouble(error, "keeping a checksum") from error
        self._kept.update(whole)

    def finish_block(self, block: int, xxh3: int) -> bool:
        """The block is whole, and `xxh3` (xxh3-64, seed 0) is its checksum: list it with the next flush.

        False when the landing is gone: the block was not kept. `Unavailable` when the volume is out.
        """
        if self.gone:
            return False
        if self.volume.state == "out":
            raise self._store.unusable(self.volume)
        if self._kept.get(block) != xxh3:
            try:
                self.volume.desk.call(self.keep_sums, [(block, xxh3)])
            except OSError as error:
                raise self.volume.trouble(error, "keeping a checksum") from error
        self._kept.pop(block, None)
        self._store.list_block(self, block, files.stored_sum(xxh3))
        self._partial.discard(block)
        return True

    def share(self) -> Landing:
        """One more user, who will also close it."""
        self._uses += 1
        return self

    def close(self) -> None:
        """No more bytes come from this user. Extra calls are ignored."""
        if self._uses <= 0:
            return
        self._uses -= 1
        if self._uses == 0:
            os.close(self._fd)
            self._store.end_landing(self, self._partial)

    def abandon(self) -> None:
        """The store closes: end the landing for all users."""
        self._uses = min(self._uses, 1)
        self.close()
