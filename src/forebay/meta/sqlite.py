"""Cluster state of a node alone: one SQLite file.

Theory. A change here is an operator's command, not a request, so each is one durable transaction (WAL, synchronous
FULL) and takes a millisecond or two of the loop. The file may hold secrets given as bucket options, so it is created
readable by its owner only, before SQLite opens it. Only one process uses it (the node's lock sees to that), so watching
needs no polling: whoever writes tells the watchers.

Rejected: a JSON file (no transactions, rewritten whole); LMDB (the volumes' index already has its own, and this file is
to be looked at with a tool everybody has).

Invariants. Those of `meta/seam.py`; the revision is kept in the file, so it grows over restarts too.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from forebay.core.errors import Invalid, Precondition, Unavailable
from forebay.meta.seam import Change, Entry

FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT OR IGNORE INTO counters VALUES ('revision', 0);
"""


class SqliteMeta:
    """`MetaStore` in the file at `path`, which is made if it is not there. `Invalid` if it is something else."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._watchers: list[tuple[str, Callable[[Change], None]]] = []
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
        except sqlite3.DatabaseError as error:
            self._file.close()
            raise Invalid(f"{path} is not a usable metadata file ({error}): move it away and start again") from error
        except Invalid:
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

    async def put(self, key: str, value: bytes, *, revision: int | None = None) -> int:
        return self._change(key, value, revision)[1]

    async def delete(self, key: str, *, revision: int | None = None) -> bool:
        return self._change(key, None, revision)[0]

    def watch(self, prefix: str, told: Callable[[Change], None]) -> Callable[[], None]:
        entry = (prefix, told)
        self._watchers.append(entry)

        def stop() -> None:
            if entry in self._watchers:
                self._watchers.remove(entry)

        return stop

    async def aclose(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _revision(self) -> int:
        (revision,) = self._open.execute("SELECT value FROM counters WHERE name = 'revision'").fetchone()
        return int(revision)

    def _change(self, key: str, value: bytes | None, expected: int | None) -> tuple[bool, int]:
        """One transaction; (whether something changed, the revision now)."""
        file = self._open
        try:
            file.execute("BEGIN IMMEDIATE")
            try:
                row = file.execute("SELECT revision FROM entries WHERE key = ?", (key,)).fetchone()
                found = int(row[0]) if row else 0
                if expected is not None and found != expected:
                    raise Precondition(f"{key} is at revision {found}, not {expected}: read it again and decide anew")
                revision = self._revision()
                if value is None and not row:
                    file.execute("ROLLBACK")
                    return False, revision
                revision += 1
                file.execute("UPDATE counters SET value = ? WHERE name = 'revision'", (revision,))
                if value is None:
                    file.execute("DELETE FROM entries WHERE key = ?", (key,))
                else:
                    file.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", (key, value, revision))
                file.execute("COMMIT")
            except BaseException:
                if file.in_transaction:
                    file.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise Unavailable(f"{self._path} cannot be written ({error}): check the disk it is on") from error
        for prefix, told in list(self._watchers):
            if key.startswith(prefix):
                told(Change(key, value, revision))
        return True, revision
