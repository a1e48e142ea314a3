"""Limits of an identity on a real node with two fronts: they count together, S3's clients are told to slow down."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.s3.conftest import client
from tests.s3.real_node import RealNode

TOKEN = "operator-token"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    file = tmp_path_factory.mktemp("identities") / "identities.json"
    once, slow = {"requests_per_s": 0.001}, {"bytes_per_s": "1KiB/s", "connections": 64}
    identities = [
        {"name": "once", "access_key_id": "AKIDONCEONCEONCE", "secret_access_key": "s/once", "allow": "read:corpus"},
        {"name": "slow", "access_key_id": "AKIDSLOWSLOWSLOW", "secret_access_key": "s/slow", "allow": "write:corpus"},
        {"name": "free", "access_key_id": "AKIDFREEFREEFREE", "secret_access_key": "s/free", "allow": "read:corpus"},
        {"name": "operator", "token_sha256": hashlib.sha256(TOKEN.encode()).hexdigest(), "allow": "admin:*"},
    ]
    identities[0]["limits"], identities[1]["limits"] = once, slow  # type: ignore[assignment]
    file.write_text(json.dumps({"identities": identities}))
    flags = ("--identities", str(file), "--fronts", "2")
    with RealNode(tmp_path_factory.mktemp("node"), *flags, token=TOKEN) as node:
        node.add_bucket("corpus", "local://", write="local")
        assert node.ask("PUT", "/-/v1/objects/corpus/k", {"authorization": f"Bearer {TOKEN}"}, b"x" * 20_000)[0] < 300
        yield node


def refusal(call: Any, **arguments: Any) -> tuple[int, str, int]:
    """How a call is refused: status, code, Retry-After."""
    with pytest.raises(ClientError) as caught:
        call(Bucket="corpus", Key="k", **arguments)
    said = caught.value.response
    told = said["ResponseMetadata"]["HTTPHeaders"]["retry-after"]
    return said["ResponseMetadata"]["HTTPStatusCode"], said["Error"]["Code"], int(told)


def test_every_front_knows_what_was_asked_of_the_others(node: RealNode) -> None:
    def anew() -> Any:
        return client(node.endpoint, "AKIDONCEONCEONCE", "s/once").get_object

    assert len(anew()(Bucket="corpus", Key="k")["Body"].read()) == 20_000
    for _ in range(12):  # a new connection each time: both fronts are met
        status, code, wait_s = refusal(anew())
        assert (status, code) == (503, "SlowDown")
        assert 500 < wait_s <= 1000
    free = client(node.endpoint, "AKIDFREEFREEFREE", "s/free")
    for _ in range(20):
        assert len(free.get_object(Bucket="corpus", Key="k")["Body"].read()) == 20_000


def test_a_body_counts_as_an_answer_does(node: RealNode) -> None:
    slow = client(node.endpoint, "AKIDSLOWSLOWSLOW", "s/slow")
    slow.put_object(Bucket="corpus", Key="k", Body=b"y" * 300_000)
    status, code, wait_s = refusal(slow.put_object, Body=b"z")
    assert (status, code) == (503, "SlowDown")
    assert 100 < wait_s < 400
    status, _, body = node.ask("GET", "/-/metrics", {"authorization": f"Bearer {TOKEN}"})
    assert status == 200
    lines = dict(line.rsplit(" ", 1) for line in body.decode().splitlines() if "limit" in line and line[0] != "#")
    assert float(lines['forebay_limited_bytes_total{identity="slow"}']) > 300_000
    assert float(lines['forebay_limit_refusals_total{identity="slow",limit="bytes"}']) == 1
    assert not any('identity="free"' in line for line in lines)
