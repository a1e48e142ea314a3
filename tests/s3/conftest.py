"""A real bucket with data, and two real nodes in front of it: one open on loopback, one that knows keys."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import boto3
import botocore.config
import pytest

from bench import servers
from tests.s3.real_node import RealNode

KEY_ID, SECRET, TOKEN = "AKIDREADERREADER", "read/er+secret", "operator-token"
OTHER_KEY_ID, OTHER_SECRET = "AKIDOTHEROTHER", "other/secret"
BUCKET = "clients"
MANY = 1_050  # more than one page


def plain_data() -> dict[str, bytes]:
    """The bucket's objects, but for the many small ones under `many/`."""
    chance = random.Random(5)
    return {
        "hello.txt": b"hello, world!",
        "empty": b"",
        "dir/one.bin": chance.randbytes(40_000),
        "dir/sub/two.bin": chance.randbytes(300_000),
        "big.bin": chance.randbytes(21 * 1024 * 1024 + 17),
        "odd/a b+c.txt": b"plus and space",
        "odd/ü-中-\U0001f600.txt": b"unicode",
        "odd/100%&=?#;.txt": b"punctuation",
    }


def client(endpoint: str, key_id: str = "any", secret: str = "any", **config: Any) -> Any:
    """A boto3 client, as users make it."""
    settings = botocore.config.Config(retries={"total_max_attempts": 1}, **config)
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
        region_name="us-east-1",
        config=settings,
    )


class Lake(NamedTuple):
    """The bucket behind the nodes, and what is in it."""

    server: servers.SeaweedFS
    objects: dict[str, bytes]

    @property
    def sizes(self) -> dict[str, int]:
        return {key: len(data) for key, data in self.objects.items()}


@pytest.fixture(scope="session")
def lake(seaweed: servers.SeaweedFS) -> Lake:
    seaweed.create_bucket(BUCKET)
    objects = plain_data() | {f"many/{number:05}": b"%05d" % number for number in range(MANY)}
    writer = client(seaweed.endpoint, max_pool_connections=8)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: writer.put_object(Bucket=BUCKET, Key=item[0], Body=item[1]), objects.items()))
    writer.put_object(
        Bucket=BUCKET, Key="typed.json", Body=b"{}", ContentType="application/json", Metadata={"colour": "blue"}
    )
    return Lake(seaweed, objects | {"typed.json": b"{}"})


@pytest.fixture(scope="session")
def open_node(lake: Lake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    """A node without identities: anybody on loopback may read."""
    with RealNode(tmp_path_factory.mktemp("open-node"), "--fronts", "1") as node:
        node.add_bucket(BUCKET, f"s3://{BUCKET}", options=lake.server.options())
        yield node


@pytest.fixture(scope="session")
def keyed_node(lake: Lake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    """A node that knows a reader of the bucket, a stranger to it, and an operator."""
    file = tmp_path_factory.mktemp("identities") / "identities.json"
    identities = [
        {"name": "reader", "access_key_id": KEY_ID, "secret_access_key": SECRET, "allow": f"read:{BUCKET}"},
        {"name": "other", "access_key_id": OTHER_KEY_ID, "secret_access_key": OTHER_SECRET, "allow": "read:other-*"},
        {"name": "operator", "token_sha256": hashlib.sha256(TOKEN.encode()).hexdigest(), "allow": "admin:*"},
    ]
    file.write_text(json.dumps({"identities": identities}))
    flags = ("--identities", str(file), "--fronts", "1")
    with RealNode(tmp_path_factory.mktemp("keyed-node"), *flags, token=TOKEN) as node:
        node.add_bucket(BUCKET, f"s3://{BUCKET}", options=lake.server.options())
        yield node
