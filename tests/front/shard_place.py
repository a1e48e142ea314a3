"""An engine over a bucket in memory and real fronts over HTTP, in one process and one loop."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from forebay.backends.seam import Backend
from forebay.backends.stack import open_backend
from forebay.backends.wrap.counting import BackendCounters, Counting
from forebay.core.types import LOCAL_URL, Bucket
from forebay.node.engine.engine import Engine
from forebay.node.front.front import Front
from forebay.node.front.objects.shards import Shards
from forebay.node.settings import Settings
from tests.engine.conftest import FakeClock, Remote
from tests.patience import PATIENCE_S, until  # noqa: F401


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> tuple[str, str]:
        """Kind and code of what went wrong."""
        said = json.loads(self.body)["error"]
        return said["kind"], said["code"]


class Place:
    """Buckets: `remote` (written through), `back` (written back to the same), `local`."""

    def __init__(self, dir: Path, fronts: int, **settings: Any) -> None:
        self.settings = Settings(dir=str(dir), listen="127.0.0.1:0", auto_buckets=False, scrub_bytes_s=0, **settings)
        self.clock = FakeClock()
        self._count = fronts
        self.fronts: list[Front] = []
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run on the place's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def start(self) -> None:
        self._thread.start()
        self.run(self._start())

    async def _start(self) -> None:
        self.remote = Remote()
        self.engine = Engine(self.settings, opener=self._opener, clock=self.clock)
        await self.engine.start()
        for bucket in (
            Bucket("remote", "memory://remote"),
            Bucket("back", "memory://remote", write="back"),
            Bucket("local", LOCAL_URL, write="local"),
        ):
            await self.engine.buckets.put(bucket)
        for number in range(self._count):
            front = Front(self.settings, number, clock=self.clock)
            await front.start()
            self.fronts.append(front)

    def _opener(self, bucket: Bucket, counters: BackendCounters) -> Backend:
        if bucket.url == LOCAL_URL:
            return open_backend(bucket, clock=self.clock, counters=counters)
        return Counting(self.remote, counters, self.clock)

    def stop(self) -> None:
        async def stop() -> None:
            for front in self.fronts:
                await front.stop(1.0)
            await self.engine.stop()

        try:
            self.run(stop())
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()

    # --- as a client -------------------------------------------------------------------------------------------------
    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.fronts[0].port}"

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, *, front: int = 0
    ) -> Answer:
        made = http.client.HTTPConnection("127.0.0.1", self.fronts[front].port, timeout=PATIENCE_S)
        try:
            made.request(method, path, body or None, headers or {})
            got = made.getresponse()
            return Answer(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())
        finally:
            made.close()

    def get(self, bucket: str, key: str, member: str | None = None, *, method: str = "GET", **more: Any) -> Answer:
        query = "" if member is None else "?" + urlencode({"member": member})
        return self.ask(method, f"/-/v1/objects/{bucket}/{quote(key)}{query}", **more)

    def put(self, bucket: str, key: str, body: bytes) -> Answer:
        headers = {"Content-Length": str(len(body))}
        return self.ask("PUT", f"/-/v1/objects/{bucket}/{quote(key)}", body, headers)

    def members(self, bucket: str, key: str, **more: Any) -> Answer:
        return self.ask("GET", f"/-/v1/members/{bucket}/{quote(key)}", **more)

    def append(self, bucket: str, key: str, name: str, body: bytes, **more: Any) -> Answer:
        headers = {"Content-Length": str(len(body)), **more.pop("headers", {})}
        path = f"/-/v1/members/{bucket}/{quote(key)}?{urlencode({'name': name})}"
        return self.ask("POST", path, body, headers, **more)

    # --- behind the curtain ------------------------------------------------------------------------------------------
    def shards(self, front: int = 0) -> Shards:
        found = self.fronts[front]._shards
        assert found is not None
        return found

    def builds(self) -> int:
        return sum(self.shards(number).builds for number in range(self._count))

    def forget_indexes(self) -> None:
        """As if the fronts had just started."""
        for number in range(self._count):
            self.shards(number)._kept.clear()

    def here(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, called on the loop."""

        async def call() -> Any:
            return work()

        return self.run(call())

    def temp_files(self) -> list[str]:
        return [path.name for volume in self.settings.volume_dirs for path in (volume / "tmp").iterdir()]


@contextmanager
def place(dir: Path, fronts: int = 1, **settings: Any) -> Iterator[Place]:
    """A running place."""
    made = Place(dir, fronts, **settings)
    made.start()
    try:
        yield made
    finally:
        made.stop()
