"""Shards as the standard library writes and reads them."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Iterable
from typing import Any

Files = list[tuple[str, bytes]]


def tar_of(files: Iterable[tuple[str, bytes]], **more: Any) -> bytes:
    """A tar; `more` as for `tarfile.open`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **more) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zip_of(files: Iterable[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in files:
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return out.getvalue()


def files_of(tar: bytes) -> Files:
    """All that is in a tar of files."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        return [(info.name, archive.extractfile(info).read()) for info in archive]  # type: ignore[union-attr]
