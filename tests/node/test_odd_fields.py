"""Odd values that a fuzzer found in native requests: each is refused with a sentence, by a running node."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.node.conftest import NodeProcess

pytestmark = pytest.mark.real
Make = Callable[..., NodeProcess]
HUGE = 10**30


def test_odd_values_in_admin_bodies_are_refused_with_a_sentence(node: Make) -> None:
    one = node("--fronts", "1")
    made = {"name": "made", "url": "local://", "write": "local"}
    copy = {"source_bucket": "made", "source_key": "k", "bucket": "made", "key": "new"}
    one.json("PUT", "buckets/made", made)
    assert one.ask("PUT", "/made/k", body=b"data")[0] == 200
    rule = {"origins": ["*"], "methods": ["GET"]}
    asked: list[tuple[str, str, Any]] = [
        ("PUT", "buckets/made", made | {"quota_bytes": HUGE}),
        ("PUT", "buckets/made", made | {"quota_bytes": -1}),
        ("PUT", "buckets/made", made | {"dirty_bytes_max": -HUGE}),
        ("PUT", "buckets/made", made | {"dirty_bytes_max": -5}),
        ("PUT", "buckets/made", made | {"cors": [rule | {"max_age_s": -1}]}),
        ("PUT", "buckets/made", made | {"cors": [rule | {"max_age_s": HUGE}]}),
        ("PUT", "buckets/made", made | {"cors": [rule | {"exposed": ["x\r\ny"]}]}),
        ("POST", "copy/made/new", copy | {"checksum_algorithm": "new"}),
        ("POST", "copy/made/new", copy | {"headers": [["transfer-encoding", "chunked"]]}),
        ("POST", "copy/made/new", copy | {"headers": [["x-amz-meta-a", "b\r\nc"]]}),
        ("POST", "hints/job", {"job": "job", "bucket": "made", "prefix": "", "listing": "m", "start": HUGE}),
        *(("GET", f"listing/made?since={since}", None) for since in ("nan", "inf", "1_0", "-1", "%D9%A3", "1e5")),
    ]  # fmt: skip
    for method, target, body in asked:
        data = None if body is None else json.dumps(body).encode()
        status, said = one.ask(method, f"/-/v1/{target}", {"Content-Type": "application/json"}, data)
        assert (status, b'"message"' in said) == (400, True), (method, target, body, said)
    assert one.json("POST", "copy/made/new", copy | {"checksum_algorithm": "crc32"})["checksums"].keys() == {"CRC32"}
    assert "a bug while" not in one.log
