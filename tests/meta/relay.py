"""A line to an etcd member that can be cut, frozen, and made to lose answers."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

from forebay.meta.etcd_link import Address


class Relay:
    """Listens at `address` and passes on to `to`. What comes from a client is also kept in `heard`."""

    def __init__(self, to: Address) -> None:
        self._to = to
        self.heard = b""
        self.deaf_to = b"\xff"  # once a client has said this, nothing that it is answered comes through
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._is_cut = False

    @property
    def address(self) -> Address:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return host, port

    def cut(self) -> None:
        """Break every connection, and every new one at once."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        self._is_cut = False

    def freeze(self) -> None:
        """Connections stay, and nothing comes through."""
        self._open.clear()

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            if self._is_cut:
                return
            there, back = await asyncio.open_connection(*self._to)
            self._writers.add(back)
            said: list[bytes] = []
            try:
                await asyncio.gather(self._pass(reader, back, said, keep=True), self._pass(there, writer, said))
            finally:
                back.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: list[bytes], *, keep: bool = False
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                await self._open.wait()
                if keep:
                    said.append(piece)
                    self.heard += piece
                elif self.deaf_to in b"".join(said):
                    continue
                writer.write(piece)
                await writer.drain()
        writer.transport.abort()
