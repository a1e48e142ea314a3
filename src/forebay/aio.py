"""Forebay for asyncio: `forebay.aio.connect()` gives a client whose methods are coroutines.

What it promises is what `forebay.Client` promises; see `forebay.client.aio`.
"""

from __future__ import annotations

from forebay.client.aio import Client, connect

__all__ = ["Client", "connect"]
