"""How simulated clients speak to the front: HTTP/1.1 over a socket of this machine."""

from __future__ import annotations

import asyncio
from typing import Any

from forebay.sim.clients import Answer

ANSWER_TIMEOUT_S = 300.0  # of virtual time: longer than any patience of the node


class Line:
    """One client's connection, which is made when it is needed. `address` is a path; "" where nobody listens."""

    def __init__(self) -> None:
        self.address = ""
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def cut(self) -> None:
        """The other side is gone."""
        self.address, self._streams = "", None

    async def ask(
        self,
        method: str,
        target: str,
        headers: dict[str, str],
        body: bytes | None,
        patience_s: float = ANSWER_TIMEOUT_S,
    ) -> Answer:
        """The answer; `OSError` if none came, or not in time: the client goes away then."""
        if not self.address:
            raise ConnectionRefusedError("nobody listens")
        try:
            async with asyncio.timeout(patience_s):
                if self._streams is None:
                    self._streams = await asyncio.open_unix_connection(self.address, limit=1 << 20)
                return await self._asked(*self._streams, method, target, headers, body)
        except (OSError, EOFError, TimeoutError) as error:
            if self._streams is not None:
                self._streams[1].transport.abort()
            self._streams = None
            raise ConnectionResetError(str(error)) from error

    async def _asked(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        method: str,
        target: str,
        headers: dict[str, str],
        body: bytes | None,
    ) -> Answer:
        lines = [f"{method} {target} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body or b'')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + (body or b""))
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(head[0].split(" ")[1])
            if status >= 200:
                break
        fields: dict[str, Any] = {}
        for line in head[1:]:
            name, _, value = line.partition(":")
            fields[name.lower()] = value.strip()
        data = b""
        if method != "HEAD" and status not in (204, 304):
            data = await self._body(reader, fields)
        if fields.get("connection", "").lower() == "close":
            writer.transport.abort()
            self._streams = None
        return Answer(status, fields, data)

    @staticmethod
    async def _body(reader: asyncio.StreamReader, fields: dict[str, Any]) -> bytes:
        if "content-length" in fields:
            return await reader.readexactly(int(fields["content-length"]))
        if fields.get("transfer-encoding") != "chunked":
            return await reader.read()
        data = b""
        while size := int((await reader.readline()).split(b";")[0], 16):
            data += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
        return data
