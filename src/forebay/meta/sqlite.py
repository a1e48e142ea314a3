"""Cluster state of a node alone: one SQLite file.

Theory. A change here is an operator's command, not a request, so each is one durable transaction (WAL, synchronous
FULL) and takes a millisecond or two of the loop. The file may hold secrets given as bucket options, so it is created
readable by its owner only, before SQLite opens it. Only one process uses it (the node's lock sees to that), so watching
needs no polling: whoever writes tells the watchers. And leases end with the process, at the latest when the file is
opened again: who held them is gone too. An entry is under a lease only while it has the revision it got it at.

Rejected: a JSON file (no transactions, rewritten whole); LMDB (the volumes' index already has its own, and this file is
to be looked at with a tool everybody has).

Invariants. Those of `meta/seam.py`; the revision is kept in the file, so it grows over restarts too.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from forebay.core.errors import ForebayError, Invalid, NotFound, Precondition, Unavailable
from forebay.meta.held_lease import HeldLease
from forebay.meta.seam import Change, Entry, Heard, Lease, check_size
from forebay.ports.clock import Clock

FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS leased (key TEXT PRIMARY KEY, lease INTEGER NOT NULL, revision INTEGER NOT NULL)
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT OR IGNORE INTO counters VALUES ('revision', 0);
"""


class SqliteMeta:
    """`MetaStore` in the file at `path`, which is made if it is not there. `Invalid` if it is something else."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._watchers: list[tuple[str, asyncio.Queue[list[Change]]]] = []
        self._leases: dict[int, tuple[float, asyncio.TimerHandle]] = {}  # how long it lasts, and when it ends
        self._leases_given = 0
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._path.chmod(0o600)
        self._file: sqlite3.Connection | None = sqlite3.connect(self._path, isolation_level=None)
        try:
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = FULL")
            (found,) = self._file.execute("PRAGMA user_version").fetchone()
            if found not in (0, FORMAT):
                raise Invalid(f"{path} has format {found}, and this version knows {FORMAT}: start the newer version")
            self._file.executescript(_SCHEMA)
            self._file.execute(f"PRAGMA user_version = {FORMAT}")
            self._end_leases("1")
        except sqlite3.DatabaseError as error:
            self._file.close()
            raise Invalid(f"{path} is not a usable metadata file ({error}): move it away and start again") from error
        except ForebayError:
            self._file.close()
            raise

    @property
    def _open(self) -> sqlite3.Connection:
        assert self._file is not None, "the metadata store is closed"
        return self._file

    async def get(self, key: str) -> Entry | None:
        row = self._open.execute("SELECT key, value, revision FROM entries WHERE key = ?", (key,)).fetchone()
        return Entry(*row) if row else None

    async def range(self, prefix: str) -> tuple[list[Entry], int]:
        rows = self._open.execute(
            "SELECT key, value, revision FROM entries WHERE substr(key, 1, length(?1)) = ?1 ORDER BY key", (prefix,)
        ).fetchall()
        return [Entry(*row) for row in rows], self._revision()

    async def put(self, key: str, value: bytes, *, revision: int | None = None, lease: int = 0) -> int:
        return self._change({key: value}, {} if revision is None else {key: revision}, lease)[1]

    async def delete(self, key: str, *, revision: int | None = None) -> bool:
        return self._change({key: None}, {} if revision is None else {key: revision})[0]

    async def transact(
        self, changes: Mapping[str, bytes | None], *, when: Mapping[str, int] | None = None, lease: int = 0
    ) -> int:
        check_size(changes, when or {})
        return self._change(changes, when or {}, lease)[1]

    async def watch(self, prefix: str) -> AsyncGenerator[Heard, None]:
        entries, revision = await self.range(prefix)
        told: asyncio.Queue[list[Change]] = asyncio.Queue()
        watcher = (prefix, told)
        self._watchers.append(watcher)
        try:
            there = sorted((Change(*entry) for entry in entries), key=lambda change: (change.revision, change.key))
            yield Heard(there, revision)
            while True:
                changes = await told.get()
                yield Heard(changes, changes[-1].revision)
        finally:
            self._watchers.remove(watcher)

    async def grant(self, ttl_s: float) -> Lease:
        self._leases_given += 1
        self._last(self._leases_given, ttl_s)
        return Lease(self._leases_given, ttl_s)

    async def renew(self, lease: int) -> None:
        self._check_lease(lease)
        ttl_s, end = self._leases[lease]
        end.cancel()
        self._last(lease, ttl_s)

    async def revoke(self, lease: int) -> None:
        if lease in self._leases:
            self._leases[lease][1].cancel()
            self._end(lease)

    def hold(self, ttl_s: float, clock: Clock) -> HeldLease:
        return HeldLease(self, ttl_s, clock)

    async def aclose(self) -> None:
        for _, end in self._leases.values():
            end.cancel()
        self._leases.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    # --- leases ------------------------------------------------------------------------------------------------------
    def _last(self, lease: int, ttl_s: float) -> None:
        self._leases[lease] = ttl_s, asyncio.get_running_loop().call_later(ttl_s, self._end, lease)

    def _end(self, lease: int) -> None:
        del self._leases[lease]
        self._end_leases("lease = ?", lease)

    def _end_leases(self, which: str, *values: int) -> None:
        """Delete what is under the leases that the condition `which` names."""
        with self._transaction() as file:
            rows = file.execute(
                f"SELECT key FROM leased JOIN entries USING (key, revision) WHERE {which} ORDER BY key", values
            ).fetchall()
            revision = self._revision() + bool(rows)
            file.execute(f"DELETE FROM leased WHERE {which}", values)
            file.executemany("DELETE FROM entries WHERE key = ?", rows)
            if rows:
                self._keep_revision(revision)
        self._tell([Change(key, None, revision) for (key,) in rows])

    def _check_lease(self, lease: int) -> None:
        if lease not in self._leases:
            raise NotFound(f"there is no lease {lease}: it ran out, take a new one")

    # --- changes -----------------------------------------------------------------------------------------------------
    def _revision(self) -> int:
        (revision,) = self._open.execute("SELECT value FROM counters WHERE name = 'revision'").fetchone()
        return int(revision)

    def _keep_revision(self, revision: int) -> None:
        self._open.execute("UPDATE counters SET value = ? WHERE name = 'revision'", (revision,))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        file = self._open
        try:
            file.execute("BEGIN IMMEDIATE")
            try:
                yield file
                file.execute("COMMIT")
            except BaseException:
                if file.in_transaction:
                    file.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise Unavailable(f"{self._path} cannot be written ({error}): check the disk it is on") from error

    def _change(self, changes: Mapping[str, bytes | None], when: Mapping[str, int], lease: int = 0) -> tuple[bool, int]:
        """One transaction; (whether something changed, the revision now)."""
        told = []
        with self._transaction() as file:
            for key, expected in when.items():
                found = self._found(key)
                if found != expected:
                    raise Precondition(f"{key} is at revision {found}, not {expected}: read it again and decide anew")
            if lease:
                self._check_lease(lease)
            before = self._revision()
            for key, value in changes.items():
                if value is not None:
                    file.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", (key, value, before + 1))
                    if lease:
                        file.execute("INSERT OR REPLACE INTO leased VALUES (?, ?, ?)", (key, lease, before + 1))
                elif not file.execute("DELETE FROM entries WHERE key = ?", (key,)).rowcount:
                    continue
                told.append(Change(key, value, before + 1))
            if told:
                self._keep_revision(before + 1)
        self._tell(told)
        return bool(told), before + bool(told)

    def _found(self, key: str) -> int:
        row = self._open.execute("SELECT revision FROM entries WHERE key = ?", (key,)).fetchone()
        return int(row[0]) if row else 0

    def _tell(self, changes: list[Change]) -> None:
        for prefix, told in self._watchers:
            under = [change for change in changes if change.key.startswith(prefix)]
            if under:
                told.put_nowait(under)
