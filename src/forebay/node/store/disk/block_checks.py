"""Whether bytes on the disk are what was stored: blocks against their checksums.

Theory. A block is read again and its xxh3-64 compared with the one in the index; inline bytes with the one in `ids`. A
bad block is dropped if the backend has it (`Store.settle_checked`). If only this node has it, it is taken out of view
and reported, since nothing can restore it (`puts.py`).

Invariant. Nothing here changes anything.
"""

from __future__ import annotations

import os

import xxhash

from forebay.core.record import Record
from forebay.node.store.disk import files, ledger
from forebay.node.store.disk.volume import Volume


def bad_blocks(volume: Volume, record: Record, chosen: list[int]) -> list[int]:
    """Those of these present blocks (or of the inline bytes, as block 0) that do not match. Any thread.

    `Unavailable` when the disk cannot be read: the volume is then out.
    """
    if record.inline is not None:
        right = xxhash.xxh3_64_intdigest(record.inline) == ledger.inline_sum(volume, record.object_id)
        return [] if right else chosen
    sums = ledger.sums_of(volume, record.object_id, chosen)
    try:
        fd = os.open(volume.data_path(record.object_id), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return chosen
    except OSError as error:
        raise volume.trouble(error, "opening a data file") from error
    try:
        return [block for block in chosen if files.block_sum(fd, record, block) != sums[block]]
    except OSError as error:
        raise volume.trouble(error, "reading a data file") from error
    finally:
        os.close(fd)
