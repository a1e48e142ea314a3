"""Buckets of every kind of backend for tests, and how a test puts objects into them behind Forebay's back."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import botocore.config
import msgspec
import pytest

from bench import servers
from forebay.backends.coded.backend import CodedBackend
from forebay.backends.local.memory import MemoryBackend
from forebay.backends.locate import locate
from forebay.backends.seam import Backend, Body, Fetch
from forebay.backends.stack import open_backend, open_coded
from forebay.backends.wrap.counting import BackendCounters, Counting
from forebay.backends.wrap.faulty import FaultPlan, Faulty
from forebay.backends.wrap.retrying import Retrying
from forebay.core.cluster.coding import ETAG_HEADER
from forebay.core.types import Bucket, Headers, ObjectInfo, RangeSpec
from forebay.ports import chance as system_chance
from forebay.ports import clock as system_clock
from forebay.ports.clock import Clock

numbers = itertools.count()
REAL = [pytest.param(kind, marks=pytest.mark.real) for kind in ("s3", "s3-keys", "azure", "gcs", "http")]
KINDS = ["memory", "file", "coded", *REAL]
LISTED = [kind for kind in KINDS if kind != REAL[-1]]  # all but plain HTTP
BUCKETED = [kind for kind in LISTED if kind not in ("memory", "coded")]  # which can be there or not
WRITTEN = [kind for kind in LISTED if kind != REAL[0]]  # those that take writes; S3 with keys, which all requests need
COPIED = [kind for kind in WRITTEN if kind != "coded"]  # those that copy where the bytes are
COPIED_KINDS = ["memory", "file", "s3-keys", "azure", "gcs"]
UPLOADED = ["memory", *REAL[1:3]]  # with uploads that can be tested: fake-gcs-server has no XML API
PAGES_MAX = 1000  # more than any listing in these tests has


class Place:
    """A bucket under test: `put` and `vanish` (which takes the whole bucket away) go around the seam; `open` is the
    stack under test."""

    def __init__(
        self,
        kind: str,
        url: str,
        options: dict[str, str],
        put: Callable[[str, bytes], None],
        vanish: Callable[[], object] | None = None,
    ) -> None:
        self.kind, self.url, self.options, self.put, self.vanish = kind, url, options, put, vanish
        self.counters = BackendCounters()

    def bare(self) -> Backend:
        """The backend alone: nothing is counted, nothing tried again."""
        return locate(Bucket("corpus", self.url, options=self.options))

    def open(self, prefix: str = "", faults: FaultPlan | None = None, clock: Clock = system_clock.system) -> Backend:
        url = f"{self.url}/{prefix}" if prefix else self.url
        bucket = Bucket("corpus", url, options=self.options)
        return open_backend(bucket, counters=self.counters, faults=faults, clock=clock)


class _Entries(MemoryBackend):
    """A bucket whose objects have the ETag that they are put with, as nodes have the entries of a coded bucket."""

    def place(self, key: str, data: bytes, headers: Headers = ()) -> ObjectInfo:
        info = super().place(key, data, headers)
        told = msgspec.structs.replace(info, etag=dict(headers)[ETAG_HEADER])
        self._objects[key] = (told, data)
        return told


class MemoryNodes:
    """Nodes that keep slices in memory. Those in `silent` do not answer, those in `away` are not asked."""

    def __init__(self, count: int) -> None:
        self.nodes = {f"node-{number}": MemoryBackend() for number in range(count)}
        self.silent: set[str] = set()
        self.away: set[str] = set()
        self.failures: list[str] = []
        self.refusals: list[str] = []

    def weights(self, needed: int) -> dict[str, float]:
        return dict.fromkeys(self.nodes.keys() - self.away, 1.0)

    def at(self, node: str, *, rested: bool = False) -> Backend | None:
        if node in self.silent:
            return Faulty(self.nodes[node], FaultPlan(seed=1, error_rate=1.0))
        return None if node in self.away else self.nodes.get(node)

    def failed(self, node: str, error: BaseException) -> None:
        self.failures.append(node)

    def refused(self, node: str) -> None:
        self.refusals.append(node)

    def keys(self) -> list[str]:
        """The names of all slices."""
        return [entry.key for each in self.nodes.values() for entry in each.entries("", "", "")]


class CodedPlace(Place):
    """A bucket that is erasure-coded over nodes that keep their slices in memory."""

    def __init__(self, count: int = 6, url: str = "coded://4+2") -> None:
        super().__init__("coded", url, {}, self._put)
        self.entries, self.nodes = _Entries(), MemoryNodes(count)

    def bare(self) -> CodedBackend:
        bucket = Bucket("corpus", self.url, write="back", copies=2)
        clock, chance = system_clock.system, system_chance.system
        backend = open_coded(bucket, lambda: self.entries, self.nodes, clock=clock, chance=chance)
        backend._grace_s = 0.0
        return backend

    def open(self, prefix: str = "", faults: FaultPlan | None = None, clock: Clock = system_clock.system) -> Backend:
        bare: Backend = self.bare() if faults is None else Faulty(self.bare(), faults, clock=clock)
        counted = Counting(bare, self.counters, clock)
        return Retrying(counted, clock, system_chance.system, self.counters) if faults is not None else counted

    def _put(self, key: str, data: bytes) -> None:
        headers = (("content-type", "text/plain"), ("cache-control", "max-age=5"), ("x-amz-meta-color", "red"))
        with ThreadPoolExecutor(1) as thread:  # a loop may run in this one
            thread.submit(lambda: asyncio.run(self.bare().put(key, Body(len(data), data), headers=headers))).result()


def s3_client(server: servers.SeaweedFS) -> object:
    """boto3, signing only if the server has keys."""
    signing = {} if server.access_key else {"signature_version": botocore.UNSIGNED}
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=server.access_key or "none",
        aws_secret_access_key=server.secret_key or "none",
        config=botocore.config.Config(s3={"addressing_style": "path"}, **signing),
    )


def s3_place(server: servers.SeaweedFS, kind: str) -> Place:
    bucket = f"bucket-{next(numbers)}"
    server.create_bucket(bucket)
    client = s3_client(server)

    def put(key: str, data: bytes) -> None:
        metadata = {"Metadata": {"color": "red"}, "ContentType": "text/plain", "CacheControl": "max-age=5"}
        client.put_object(Bucket=bucket, Key=key, Body=data, **metadata)  # type: ignore[attr-defined]

    def vanish() -> None:
        for entry in client.list_objects_v2(Bucket=bucket).get("Contents", []):  # type: ignore[attr-defined]
            client.delete_object(Bucket=bucket, Key=entry["Key"])  # type: ignore[attr-defined]
        client.delete_bucket(Bucket=bucket)  # type: ignore[attr-defined]

    return Place(kind, f"s3://{bucket}", server.options(), put, vanish)


def write_file(path: Path, data: bytes) -> None:
    """A new file each time, as programs that replace a file do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(data)
    os.replace(fresh, path)


async def whole(fetch: Fetch) -> bytes:
    """All bytes of a body."""
    got = b"".join([bytes(chunk) async for chunk in fetch])
    await fetch.aclose()
    assert len(got) == fetch.end - fetch.start
    return got


async def read(backend: Backend, key: str, range: RangeSpec | None = None, *, version: str = "") -> bytes:
    """All bytes of an object or a range of it."""
    return await whole(await backend.fetch(key, range, version=version))


async def list_all(
    backend: Backend, prefix: str = "", delimiter: str = "", after: str = "", limit: int = 1000
) -> tuple[list[str], list[str]]:
    """Keys and prefixes of all pages, in the order they came."""
    keys: list[str] = []
    prefixes: list[str] = []
    for _ in range(PAGES_MAX):
        page = await backend.list_page(prefix, delimiter, after, limit)
        assert len(page.entries) + len(page.prefixes) <= limit
        keys += [entry.key for entry in page.entries]
        prefixes += page.prefixes
        if not page.next_after:
            return keys, prefixes
        after = page.next_after
    raise AssertionError("the listing does not end")


def run(test: Coroutine[object, object, None]) -> None:
    """Run a test's coroutine."""
    asyncio.run(test)
