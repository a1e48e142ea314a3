"""What writes ask of other parts of the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from forebay.core.machines.sent_bodies import Sent
from forebay.core.record import Record
from forebay.core.types import Bucket, ObjectInfo
from forebay.node.store.disk.notes import Note, Owed
from forebay.node.store.writer.puts import Change


class Owes(Protocol):
    """What the backends are owed (`node/engine/flush/flusher.py`), as writes use it."""

    def add(self, owed: Owed) -> None: ...

    def find(self, bucket: str, key: str) -> Note | None: ...

    def sent(self, bucket: str, key: str) -> Sent: ...

    def forget(self, bucket: str, key: str) -> None: ...

    async def stop_key(self, bucket: str, key: str) -> None: ...

    def room(self, bucket: Bucket, size_bytes: int) -> AbstractAsyncContextManager[None]: ...

    def admits(self, bucket: Bucket, size_bytes: int) -> int | None: ...

    def ended(self, name: str, writer: int) -> None: ...

    def window(self, bucket: str, prefix: str, start_after: str, limit: int) -> list[tuple[str, Note]]: ...


class Replicas(Protocol):
    """What other nodes keep for this one (`node/engine/replicas.py`)."""

    def keeps_twice(self, bucket: str) -> bool: ...

    async def commit(self, change: Change) -> Record | None: ...

    async def clear(self, bucket: str, key: str) -> None: ...

    async def retag(
        self, bucket: str, info: ObjectInfo, note: Note | None, act: Callable[[], Awaitable[None]]
    ) -> None: ...
