"""What somebody meets who follows the README: real nodes, typed to as they would type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Program
from tests.cli.test_real_node import fill
from tests.cli.test_real_node import real as real
from tests.node.lossy import Lossy

pytestmark = pytest.mark.real

KEYS = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@pytest.fixture
def relay(real: Program) -> Iterator[str]:
    """Another address of the node."""
    relay = Lossy(real.env["FOREBAY_URL"])
    yield relay.endpoint
    relay.close()


@pytest.mark.parametrize("identities", [False, True])
def test_a_node_started_where_aws_endpoint_url_names_it_refuses_to_be_its_own_backend(
    real: Program, tmp_path: Path, relay: str, identities: bool
) -> None:
    real.env |= KEYS | {"AWS_ENDPOINT_URL": real.env["FOREBAY_URL"]}
    flags = []
    if identities:
        keys = str(tmp_path / "keys.json")
        made = real("key", "create", "me", "--allow", "admin:*", "--file", keys, "--json").stdout
        real.env["FOREBAY_TOKEN"] = json.loads(made)["token"]
        flags = ["--identities", keys]
    out = real.process("up", "--listen", real.env["FOREBAY_LISTEN"], "--fronts", "0", *flags).communicate(timeout=120)[
        0
    ]
    assert b"names the node itself" in out
    for program in ("bucket", "add", "corpus", "s3://corpus"), ("get", "found/by-itself", str(tmp_path / "x")):
        error = real(*program, code=6).stderr
        assert "is this node itself" in error, program
        assert "env -u AWS_ENDPOINT_URL" in error
    options = ("--option", f"endpoint={relay}", "--option", "access_key_id=a", "--option", "secret_access_key=b")
    assert "is this node itself" in real("bucket", "add", "corpus", "s3://corpus", *options, code=6).stderr
    assert "is this node itself" in real("bucket", "add", "corpus", f"{relay}/corpus", code=6).stderr
    fill(tmp_path / "bucket")
    real("bucket", "add", "data", f"file://{tmp_path / 'bucket'}")
    real("get", "data/train/b", str(tmp_path / "b"))
