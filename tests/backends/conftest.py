"""One bucket of each kind of backend."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import AzureStore

from bench import servers
from forebay.backends.local import memory
from tests.backends.backend_places import CodedPlace, Place, numbers, s3_place, write_file


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """The bucket of the kind that the test is parametrised with."""
    kind = request.param
    if kind == "memory":
        name = f"test-{next(numbers)}"
        headers = (("content-type", "text/plain"), ("cache-control", "max-age=5"), ("x-amz-meta-color", "red"))
        yield Place(kind, f"memory://{name}", {}, lambda key, data: memory.named(name).place(key, data, headers))
    elif kind == "coded":
        yield CodedPlace()
    elif kind == "file":
        yield Place(
            kind,
            tmp_path.as_uri(),
            {},
            lambda key, data: write_file(tmp_path / key, data),
            lambda: shutil.rmtree(tmp_path),
        )
    elif kind == "s3":
        yield s3_place(request.getfixturevalue("seaweed"), kind)
    elif kind == "s3-keys":
        yield s3_place(request.getfixturevalue("seaweed_keys"), kind)
    elif kind == "azure":
        azurite: servers.Azurite = request.getfixturevalue("azurite")
        container = f"container-{next(numbers)}"
        azurite.create_container(container)
        store = AzureStore(container, **azurite.options(), client_options={"allow_http": True})  # type: ignore[arg-type]
        attributes = {"Content-Type": "text/plain", "Cache-Control": "max-age=5", "color": "red"}
        yield Place(
            kind,
            f"az://{container}",
            azurite.options(),
            lambda key, data: obstore.put(store, key, data, attributes=attributes) and None,
            lambda: azurite.delete_container(container),
        )
    elif kind == "gcs":
        gcs: servers.FakeGCS = request.getfixturevalue("gcs")
        bucket = f"bucket-{next(numbers)}"
        gcs.create_bucket(bucket)
        yield Place(
            kind,
            f"gs://{bucket}",
            gcs.options(),
            lambda key, data: gcs.put(bucket, key, data, "text/plain"),
            lambda: gcs.delete_bucket(bucket),
        )
    else:
        web: servers.Nginx = request.getfixturevalue("http_server")
        folder = f"folder-{next(numbers)}"
        (web.root / folder).mkdir()
        yield Place(kind, f"{web.url}/{folder}", {}, lambda key, data: write_file(web.root / folder / key, data))
