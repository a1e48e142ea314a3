"""Buckets of every kind of backend for tests, and how a test puts objects into them behind Forebay's back."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine
from pathlib import Path

import boto3
import botocore.config
import pytest

from bench import servers
from forebay.backends.locate import locate
from forebay.backends.seam import Backend, Fetch
from forebay.backends.stack import open_backend
from forebay.backends.wrap.counting import BackendCounters
from forebay.backends.wrap.faulty import FaultPlan
from forebay.core.types import Bucket, RangeSpec
from forebay.ports import clock as system_clock
from forebay.ports.clock import Clock

numbers = itertools.count()
REAL = [pytest.param(kind, marks=pytest.mark.real) for kind in ("s3", "s3-keys", "azure", "gcs", "http")]
KINDS = ["memory", "file", *REAL]
LISTED = [kind for kind in KINDS if kind != REAL[-1]]  # all but plain HTTP
BUCKETED = [kind for kind in LISTED if kind != "memory"]  # which can be there or not
WRITTEN = [kind for kind in LISTED if kind != REAL[0]]  # those that take writes; S3 with keys, which all requests need
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
