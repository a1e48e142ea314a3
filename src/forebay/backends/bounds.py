"""What a node keeps its buckets from: its own files, and places that nobody allowed.

Theory. `core/reach.py` judges what a bucket says. Here it is judged what that comes to: a path after its links
were followed, an address after its name was resolved. Both may change while a bucket is in use, so both are judged at
each use: a path when a file or folder is opened, an address before a connection is made.

The node's own directory, its volumes and the files with its secrets are no bucket's, whoever set it: who may write
there may be anybody. A file is known by device and inode too, since it may have other names.

Invariants. (1) Nothing is sent to an address that was not judged. (2) A `Bounds` of nothing bounds only held buckets.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from forebay.core.errors import Denied
from forebay.core.reach import Reach, is_inner
from forebay.core.types import Bucket

AllowsPath = Callable[[str], bool]  # of a path without links
Dial = Callable[..., socket.socket]  # as socket.create_connection


class Bounds:
    """`folders` and `files` are the node's own, as absolute paths."""

    def __init__(self, reach: Reach | None = None, folders: Iterable[str] = (), files: Sequence[str] = ()) -> None:
        self._reach = reach or Reach()
        self._folders = [os.path.realpath(folder) for folder in folders]
        self._files = list(files)

    def check(self, bucket: Bucket) -> None:
        """Return if `bucket` may be opened. `Denied` or `Invalid` if it is held, and not within what is allowed."""
        if bucket.held:
            self._reach.check(bucket)

    def paths(self, bucket: Bucket) -> AllowsPath:
        """What says whether the bucket may reach a path."""

        def allows(path: str) -> bool:
            if bucket.held and not self._reach.allows_path(bucket.name, path):
                return False
            return not self._is_own(path)

        return allows

    def _is_own(self, path: str) -> bool:
        if any(path == folder or path.startswith(f"{folder}/") for folder in self._folders):
            return True
        return any(path in (file, os.path.realpath(file)) or _is_same(path, file) for file in self._files)

    def dial(self, bucket: Bucket) -> Dial | None:
        """What makes the connections of a bucket whose addresses are judged; None for any other bucket."""
        return self._dial if bucket.held and self._reach.is_watched(bucket) else None

    def _dial(self, address: tuple[str, int], timeout: Any = None, source_address: Any = None) -> socket.socket:
        """A connection to `address`, as `socket.create_connection` makes it. `Denied` if each of its addresses is inner
        and not allowed."""
        host, port = address
        failed: Exception | None = None
        for _, _, _, _, (found, *_) in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            if is_inner(str(found)) and not self._reach.allows_inner(host, port):
                failed = Denied(
                    f"{host} leads to {found}, which is this machine's or its link's own: have whoever holds admin:* "
                    f"set the bucket, or start the node with --allow-backend naming that address and its port {port}",
                    code="AccessDenied",
                )
                continue
            try:
                return socket.create_connection((str(found), port), timeout, source_address)
            except OSError as error:
                failed = error
        raise failed or OSError(f"{host} has no address")


def _is_same(path: str, other: str) -> bool:
    try:
        return Path(path).samefile(other)
    except OSError:
        return False
