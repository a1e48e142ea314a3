"""The store: data files and an index on one or more local disks. One process writes, any number read.

Theory. A *volume* is a directory on one disk. It holds one data file per (bucket, key, version), with bytes at their
natural offsets and sparse where blocks are absent, and an index (LMDB) of the blocks that are present. Small objects
live in their index record. The index alone decides what is served: a file without a record is rubbish to be removed,
and a block that the index does not list is not read. `docs/disk-format.md` specifies every byte.

Who uses what.

* A front opens `StoreReader(volumes)` and serves hits: `lookup`, then `acquire` for a data file, `scan_entries` for
  listings. `Welcome` names the volumes; on each later `Welcome` it calls `refresh(volumes)`; on `Dropped`, `dropped`.
* The engine opens `Store.open(dirs)`, and lands bytes with `begin` -> `Landing.write` -> `Landing.finish_block`, or
  `put_inline`. Changes gather in memory and become visible to readers with `flush()` (group commit). The engine calls
  it every few milliseconds while `store.pending` is not zero, and at once when somebody waits. `Store.lookup` sees
  pending changes.
* Changes by writers (`Put`, `Delete`) go through `prepare`, `make_durable` and `publish`, many at once, at most one per
  key at a time. Bodies are received into `StoreReader.incoming`. Dirty and local objects, and tombstones, are *owned*:
  no landing, eviction or `forget` touches them, only further changes, and `mark_clean` when the backend has them. After
  a start `Store.catching` yields what is to be flushed.
* Evicting takes three steps, so that no reader ever meets a hole: `drop_units` (out of the index), `flush` (committed),
  `reclaim` (unlink, or punch under an exclusive lock). `forget` and replacing work the same way. After a flush,
  `take_dropped` names the objects whose files fronts must close (`Dropped`).

Threads. `Landing.write`, `Store.check_blocks`, `Store.reclaim`, `Store.sync`, `Store.make_durable`, `Store.write_notes`
and `Store.settle` may run in worker threads, since they move bytes or wait for disks, and release the GIL. Everything
else belongs to the thread that opened the store.

Failures. A call that meets a full or broken disk marks the volume `full` or `out`, calls `on_event`, and raises
`Unavailable`: pass the bytes through, and send fronts `volumes()` again when a volume is out. `full` heals by itself
(`housekeep`). `flush`, `lookup` and `reclaim` do not raise for a disk: they report it and go on with the other volumes.

Missing volumes. The node remembers its volumes outside of them (`writer/remembered_volumes.py`, `core/volumes.py`).
What an absent volume may own is neither read nor written (`check_present`).

Two indexes. Readers use the visible one, which holds every record and is not synced. What no stop may lose is also in a
synced one (`durable.py`), from which it is restored to view (`owned.py`).

Invariants. (1) A block is listed present only after it landed whole and its checksum was stored. (2) An object id is
never used twice. (3) A hole is punched only after its block left the committed index and while no reader holds a lease.
(4) No state per object is kept in memory: only landings, pending changes and drops not yet reclaimed.
"""
