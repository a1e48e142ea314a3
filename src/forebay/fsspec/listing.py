"""Converts listings and heads into fsspec's form, and makes a tree of directories from one listing.

Theory. Directories are only beginnings of keys, so one listing of all keys under a path shows every directory in it.
Some programs mark a directory with a key that ends with a slash: it is a directory, no file.

Invariants. (1) Names have no protocol, and no slash at their end. (2) Every directory of a tree is in its parent.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from forebay.client import flows
from forebay.core.types import ListEntry

Info = dict[str, Any]
Listing = dict[str, Info]  # of one directory, by name and in its order


def directory(name: str) -> Info:
    return {"name": name, "size": 0, "type": "directory"}


def of_entry(bucket: str, entry: ListEntry) -> Info:
    """An object in a listing."""
    return _file(f"{bucket}/{entry.key}", entry.size_bytes, entry.etag, entry.modified_s)


def of_head(path: str, got: flows.Got) -> Info:
    """An object that was asked for itself: its headers are told, too."""
    said = got.headers.get("last-modified", "")
    modified_s = parsedate_to_datetime(said).timestamp() if said else 0.0
    metadata = {name[11:]: text for name, text in got.headers.items() if name.startswith("x-amz-meta-")}
    kind = {"content_type": got.headers.get("content-type", ""), "metadata": metadata}
    return _file(path, got.size_bytes, got.etag, modified_s) | kind


def _file(name: str, size_bytes: int, etag: str, modified_s: float) -> Info:
    return {
        "name": name,
        "size": size_bytes,
        "type": "file",
        "etag": etag,
        "mtime": modified_s,
        "last_modified": datetime.fromtimestamp(modified_s, UTC),
    }


def in_order(infos: Iterable[Info]) -> Listing:
    return {info["name"]: info for info in sorted(infos, key=lambda info: str(info["name"]))}


class Tree:
    """The directories under `path`, each with what lies directly in it, made of keys as they come."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._inside: dict[str, list[Info]] = {path: []}

    def add(self, bucket: str, entry: ListEntry) -> None:
        """An object under the path."""
        name = f"{bucket}/{entry.key}"
        folder = name.rpartition("/")[0]
        self._have(folder)
        if not name.endswith("/"):
            self._inside[folder].append(of_entry(bucket, entry))

    def _have(self, folder: str) -> None:
        missing = []
        while folder not in self._inside and len(folder) > len(self._path):
            missing.append(folder)
            folder = folder.rpartition("/")[0]
        for made in reversed(missing):
            self._inside[made] = []
            self._inside[made.rpartition("/")[0]].append(directory(made))

    def listings(self) -> Iterable[tuple[str, Listing]]:
        """Each directory that is not empty, and its listing."""
        return ((folder, in_order(infos)) for folder, infos in self._inside.items() if infos)

    def all(self) -> list[Info]:
        """All files and directories, but for the path itself."""
        return [dict(info) for infos in self._inside.values() for info in infos]
