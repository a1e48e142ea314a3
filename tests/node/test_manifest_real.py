"""One listing for a job, asked of a running node by its clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.node.conftest import NodeProcess

import forebay.aio
from forebay import connect
from forebay.core.errors import NotFound, Precondition
from forebay.core.manifest import Manifest


@pytest.mark.real
def test_a_job_lists_its_bucket_once_and_knows_it_again(node: Callable[..., NodeProcess], tmp_path: Path) -> None:
    data = tmp_path / "data"
    for n in range(2300):
        folder = data / f"class-{n % 23:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{n:06d}.jpg").write_bytes(b"x" * (n % 7))
    one = node()
    one.add_bucket("photos", f"file://{data}")
    found: list[Manifest] = []

    def worker() -> None:
        with connect(one.endpoint) as client:
            found.append(client.manifest("photos"))

    workers = [threading.Thread(target=worker) for _ in range(4)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    manifest = found[0]
    assert len(found) == 4
    assert len({each.id for each in found}) == 1
    assert manifest.keys() == sorted(f"class-{n % 23:02d}/{n:06d}.jpg" for n in range(2300))
    number = manifest.find("class-03/000003.jpg")
    assert number is not None
    assert manifest.sizes[number] == 3

    status, body = one.ask("GET", f"/-/v1/manifest/photos?id={manifest.id}")
    assert (status, body) == (200, bytes(manifest.data))
    status, body = one.ask("GET", "/-/v1/manifest/photos", {"If-None-Match": f'"{manifest.id}"'})
    assert (status, body) == (304, b"")
    status, body = one.ask("HEAD", "/-/v1/manifest/photos")
    assert (status, body) == (200, b"")

    (data / "class-00" / "new.jpg").write_bytes(b"new")
    with connect(one.endpoint) as client:
        assert client.manifest("photos").id == manifest.id, "immutable: not looked at again unless asked to"
        heard: list[int] = []
        assert len(client.manifest("photos", refresh=True, progress=heard.append)) == 2301
        assert len(client.manifest("photos", "class-00/")) == 101
        with pytest.raises(Precondition, match=r"1 object was added \(class-00/new.jpg\)"):
            client.manifest("photos", id=manifest.id)
        with pytest.raises(NotFound):
            client.manifest("nobody-has-it")

    async def again() -> Manifest:
        async with forebay.aio.connect(one.endpoint) as client:
            return await client.manifest("photos", "class-22/")

    assert len(asyncio.run(again())) == 100
