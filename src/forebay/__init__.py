"""Forebay: a fast tier of local disks between object storage and GPUs.

`connect()` gives a client of a node, `aio.connect()` one for asyncio; the error kinds are what they raise. See
README.md; the design is in docs/design. Names are loaded when they are first used, so importing the package opens and
costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay import aio
    from forebay.client.shards.writer import ShardWriter
    from forebay.client.sync import Client, connect
    from forebay.core.errors import (
        Busy,
        Closed,
        Corrupt,
        Denied,
        Exists,
        ForebayError,
        Invalid,
        NotFound,
        NotSupported,
        Precondition,
        Unavailable,
    )

if not __debug__:
    raise RuntimeError("Forebay's asserts guard data and stay on: run Python without -O and without PYTHONOPTIMIZE")

__version__ = "0.1.0"
__all__ = [
    "Busy",
    "Client",
    "Closed",
    "Corrupt",
    "Denied",
    "Exists",
    "ForebayError",
    "Invalid",
    "NotFound",
    "NotSupported",
    "ObjectLost",
    "Precondition",
    "ShardWriter",
    "Unavailable",
    "VolumeMissing",
    "__version__",
    "aio",
    "connect",
]
_ROOMS = {
    "Client": "forebay.client.sync",
    "connect": "forebay.client.sync",
    "ShardWriter": "forebay.client.shards.writer",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'forebay' has no attribute {name!r}")
    if name == "aio":
        return importlib.import_module("forebay.aio")
    return getattr(importlib.import_module(_ROOMS.get(name, "forebay.core.errors")), name)
