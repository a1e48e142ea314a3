"""The two clients under a filesystem: one for the loop it runs on, one for files and for threads.

Theory. What fsspec wants as coroutines goes through the asyncio client, which belongs to one loop: fsspec's own thread,
or the caller's loop. Open files, files that are sent or fetched whole, and many reads at once go through the blocking
client: it sends from the page cache, and on the node's host it reads from the node's files. Both are made at first use.

Forks. A child has the parent's sockets, and fsspec drops its instances in every child. Closing an asyncio connection
there would take it out of the poll set that the child shares with its parent, whose loop would then wait for ever. So
clients are kept alive by a finalizer, which in a child only lets the descriptors go (`aio.Client.abandon`).

Invariant. A client of a loop is used on that loop, in the process that made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

from forebay.client import aio
from forebay.client.sync import Client


class Clients:
    """Arguments as of `forebay.connect`. Opens nothing yet."""

    def __init__(self, url: str | None, token: str | None, ca: str | None, patience_s: float | None) -> None:
        self._arguments = (url, token, ca, patience_s)
        self.blocking = Client(url, token=token, ca=ca, patience_s=patience_s)
        self._on_loop: aio.Client | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()

    @property
    def on_loop(self) -> aio.Client:
        """The client of the loop that runs here."""
        loop = asyncio.get_running_loop()
        if self._on_loop is None or self._loop is not loop or self._pid != os.getpid():
            self._leave_loop()
            url, token, ca, patience_s = self._arguments
            self._on_loop = aio.connect(url, token=token, ca=ca, patience_s=patience_s)
            self._loop, self._pid = loop, os.getpid()
        return self._on_loop

    async def aclose(self) -> None:
        """Close what is open, on the loop that it was used on. What is used again opens again."""
        self.blocking.close_idle()
        if self._on_loop is not None and self._loop is asyncio.get_running_loop() and self._pid == os.getpid():
            client, self._on_loop = self._on_loop, None
            await client.aclose()

    def let_go(self) -> None:
        """Give everything up from outside of the loop: from another thread, or in a forked child."""
        self.blocking.close_idle()
        self._leave_loop()

    def _leave_loop(self) -> None:
        client, loop, self._on_loop = self._on_loop, self._loop, None
        if client is None or loop is None:
            return
        if self._pid != os.getpid():
            client.abandon()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(client.drop)
