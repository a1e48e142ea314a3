"""A store to try things on, objects whose bytes follow from (key, version), and the moves that land and read them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import xxhash

from forebay.core.record import Record, blocks_in
from forebay.core.types import ObjectInfo
from forebay.node.store.disk.volume import StoreEvent
from forebay.node.store.reader import StoreReader
from forebay.node.store.writer.landing import Landing
from forebay.node.store.writer.writer import Store
from tests.patience import PATIENCE_S

BUCKET = "corpus"


class Bench:
    """A store with small blocks, what it told, and readers that are closed with it."""

    def __init__(self, dirs: list[Path], **options: object) -> None:
        self.dirs = dirs
        self.options: dict[str, object] = {"block_bytes": 64 * 1024, **options}
        self.events: list[StoreEvent] = []
        self.readers: list[StoreReader] = []
        self.store = self.open()

    def open(self) -> Store:
        self.store = Store.open(self.dirs, on_event=self.events.append, **self.options)  # type: ignore[arg-type]
        return self.store

    def reader(self, **options: int) -> StoreReader:
        reader = StoreReader(self.store.volumes(), **options)
        self.readers.append(reader)
        return reader

    def settle(self) -> None:
        """Return when the disks' own threads have done what they were given: what is left by then stays."""
        for volume in self.store._all:
            volume.desk.begin(lambda: None).result(PATIENCE_S)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def close(self, *, clean: bool = True) -> None:
        for reader in self.readers:
            reader.close()
        self.readers.clear()
        self.store.close(clean=clean)


def content(key: str, version: str, size_bytes: int) -> bytes:
    """Never a run of zeros: a hole cannot be mistaken for it."""
    seed = hashlib.blake2b(f"{key}\0{version}".encode(), digest_size=32).digest()
    return hashlib.shake_128(seed).digest(min(size_bytes, 4096)) * (size_bytes // 4096 + 1)


def make(key: str, size_bytes: int, version: str = "v1") -> tuple[ObjectInfo, bytes]:
    info = ObjectInfo(key, size_bytes, version, f"etag-{version}", 1_700_000_000.0, (("content-type", "x/y"),))
    return info, content(key, version, size_bytes)[:size_bytes]


def land_block(landing: Landing, data: bytes, block: int) -> None:
    part = data[block * landing.block_bytes : (block + 1) * landing.block_bytes]
    landing.write(block * landing.block_bytes, part)
    landing.finish_block(block, xxhash.xxh3_64_intdigest(part))


def land(
    store: Store, key: str, size_bytes: int, version: str = "v1", blocks: list[int] | None = None, bucket: str = BUCKET
) -> int:
    """Land an object (or some blocks of it) and flush; its object id."""
    info, data = make(key, size_bytes, version)
    landing = store.begin(bucket, info, checked_s=100.0)
    for block in range(blocks_in(size_bytes, landing.block_bytes)) if blocks is None else blocks:
        land_block(landing, data, block)
    store.flush()
    landing.close()
    return landing.object_id


def read(reader: StoreReader, key: str, bucket: str = BUCKET) -> bytes | None:
    """What a front would serve: the whole object, or None when not every byte is present."""
    record = reader.lookup(bucket, key)
    if record is None or not record.has(0, record.size_bytes):
        return None
    if record.inline is not None:
        return record.inline
    leased = reader.acquire(bucket, key, record)
    if leased is None or not leased.record.has(0, record.size_bytes):
        return None
    data = os.pread(leased.fd, record.size_bytes, 0)
    leased.release()
    return data


def present(record: Record) -> list[int]:
    return [
        block
        for block in range(blocks_in(record.size_bytes, record.block_bytes))
        if record.has(block * record.block_bytes, min((block + 1) * record.block_bytes, record.size_bytes))
    ]
