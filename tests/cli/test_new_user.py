"""What somebody meets who follows the README: real nodes, typed to as they would type."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.servers import SeaweedFS
from forebay.cli.up import welcome
from forebay.client import local_node
from tests.cli.conftest import Program
from tests.cli.test_real_node import fill, up
from tests.cli.test_real_node import real as real
from tests.node.lossy import Lossy
from tests.patience import until

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
    assert (b"export FOREBAY_TOKEN=" in out) == identities
    for program in ("bucket", "add", "corpus", "s3://corpus"), ("get", "found/by-itself", str(tmp_path / "x")):
        error = real(*program, code=6).stderr
        assert "is this node itself" in error, program
        assert "env -u AWS_ENDPOINT_URL" in error
    options = ("--option", f"endpoint={relay}", "--option", "access_key_id=a", "--option", "secret_access_key=b")
    assert "is this node itself" in real("bucket", "add", "corpus", "s3://corpus", *options, code=6).stderr
    assert "is this node itself" in real("bucket", "add", "corpus", f"{relay}/corpus", code=6).stderr
    real("bucket", "add", "corpus", "s3://corpus", "--no-check", "--write", "back")
    assert "is this node itself" in real("get", "corpus/key", str(tmp_path / "x"), code=6).stderr
    fill(tmp_path / "bucket")
    real("put", str(tmp_path / "bucket" / "train" / "b"), "corpus/kept")
    assert "is this node itself" in real("flush", "corpus", code=9).stderr
    real("bucket", "rm", "corpus", "--force")
    real("bucket", "add", "data", f"file://{tmp_path / 'bucket'}")
    real("get", "data/train/b", str(tmp_path / "b"))


def test_a_node_with_tls_says_how_clients_trust_it(tmp_path: Path) -> None:
    there = local_node.Running(1, "https://127.0.0.1:9400", "1.0")
    said = welcome(there, tmp_path, None, started=True, identities=False, certificate="/etc/node.pem")
    assert "export FOREBAY_CA=/etc/node.pem AWS_CA_BUNDLE=/etc/node.pem" in said
    assert "FOREBAY_TOKEN" not in said


def test_the_keys_of_a_bucket_that_owes_something_can_be_changed(
    real: Program, tmp_path: Path, seaweed_keys: SeaweedFS
) -> None:
    seaweed_keys.create_bucket("newkeys")
    right = seaweed_keys.options()
    wrong = [word for pair in (right | {"secret_access_key": "old"}).items() for word in ("--option", "=".join(pair))]
    up(real, "--no-auto-buckets")
    add = ("bucket", "add", "owing", "s3://newkeys", "--write", "back", *wrong)
    real(*add, code=4)
    real(*add, "--no-check")
    (tmp_path / "file").write_bytes(b"only here")
    real("put", str(tmp_path / "file"), "owing/ckpt")

    def failing() -> str:
        return next((f["what"] for f in found(real, 1) if (f["check"], f["subject"]) == ("flush", "owing")), "")

    assert "or deletes (9 B): the flush failed of ckpt: Denied" in until(failing)
    new_key = ("bucket", "set", "owing", "--option", f"secret_access_key={right['secret_access_key']}")
    assert "--force" in real(*new_key, "--option", "endpoint=http://127.0.0.1:1", "--no-check", code=6).stderr
    real(*new_key)
    real("flush", "owing")
    state = json.loads(real("stat", "owing/ckpt", "--json").stdout)
    assert (state["dirty"], state["cached_bytes"]) == (False, 9), "nothing was evicted"
    real("bucket", "set", "owing", "--option", "secret_access_key=old", "--no-check")
    real("put", str(tmp_path / "file"), "owing/second")
    assert "--force" in real("bucket", "rm", "owing", code=6).stderr
    assert real("bucket", "rm", "owing", "--force").stderr == "given up: owing/second (9 B)\n"
    assert "owing" not in real("bucket", "ls").stdout


def test_what_is_under_way_in_a_bucket_outlives_a_change_of_its_settings(
    real: Program, tmp_path: Path, seaweed_keys: SeaweedFS
) -> None:
    seaweed_keys.create_bucket("settings")
    up(real, "--no-auto-buckets")
    options = [word for pair in seaweed_keys.options().items() for word in ("--option", "=".join(pair))]
    real("bucket", "add", "changed", "s3://settings", *options)
    (tmp_path / "file").write_bytes(b"x" * 20_000)
    for key in ("train/a", "train/b"):
        real("put", str(tmp_path / "file"), f"changed/{key}")
    (pinned,) = json.loads(real("pin", "changed/train/", "--json").stdout)  # it is a setting of the bucket
    assert (pinned["state"], pinned["units_failed"], pinned["errors"]) == ("done", 0, [])
    assert json.loads(real("bucket", "show", "changed", "--json").stdout)["pinned"] == ["train/"]
    assert (
        "no pin on s3://changed/tran/; pins of this bucket: s3://changed/train/"
        in real("unpin", "changed/tran/", code=3).stderr
    )
    assert real("unpin", "changed/train/").stderr == ""
    sending = real.process("put", "-", "changed/sent", stdin=subprocess.PIPE)
    assert sending.stdin is not None
    sending.stdin.write(b"y" * (20 << 20))  # in parts from 16 MiB on: some are at the backend
    sending.stdin.flush()
    real("bucket", "set", "changed", "--quota", "1GiB")
    sending.stdin.write(b"z")
    out, error = sending.communicate(timeout=120)
    assert sending.returncode == 0, (out, error)
    assert json.loads(real("stat", "changed/sent", "--json").stdout)["size_bytes"] == (20 << 20) + 1


def test_the_trainer_of_the_manual_reads_its_checkpoints(real: Program, tmp_path: Path) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    real.env |= {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    (allow,) = re.findall(r"forebay key create trainer --allow '(.*)'", manual)
    keys = ("--file", str(tmp_path / "keys.json"))
    admin = json.loads(real("key", "create", "ops", "--allow", "admin:*", *keys, "--json").stdout)["token"]
    said = real("key", "create", "trainer", "--allow", allow, *keys).stdout
    assert "unset AWS_SESSION_TOKEN AWS_PROFILE" in said
    up(real, "--identities", keys[1], "--fronts", "0")
    assert "no token came: set FOREBAY_TOKEN" in real("ls", code=4).stderr
    real.env["FOREBAY_TOKEN"] = "another"
    assert "the token is not one that it knows: set FOREBAY_TOKEN" in real("ls", code=4).stderr
    real.env["FOREBAY_TOKEN"] = admin
    real("bucket", "add", "ckpt-run", "local://")
    real.env["FOREBAY_TOKEN"] = said.partition("FOREBAY_TOKEN=")[2].split()[0]
    (tmp_path / "step-1").write_bytes(b"weights")
    real("put", str(tmp_path / "step-1"), "ckpt-run/step-1")
    real("get", "ckpt-run/step-1", str(tmp_path / "again"))
    assert (tmp_path / "again").read_bytes() == b"weights"
    error = real("presign", "ckpt-run/step-1", code=4).stderr
    assert "AWS_SECRET_ACCESS_KEY are not set" in error
    real.env |= dict(re.findall(r"export (AWS_\w+)=(\w+)", said))
    with urllib.request.urlopen(real("presign", "ckpt-run/step-1").stdout.strip(), timeout=60) as answer:
        assert answer.read() == b"weights"
    link = real("presign", "ckpt-run/a b/é", "--put", "--expires", "15m").stdout.strip()
    with urllib.request.urlopen(urllib.request.Request(link, b"sent", method="PUT"), timeout=60) as answer:
        assert answer.status == 200
    real("stat", "ckpt-run/a b/é")
    real("presign", "ckpt-run/step-1", "--expires", "8d", code=2)


def found(real: Program, code: int) -> list[dict[str, str]]:
    report = json.loads(real("doctor", "--no-measure", "--json", code=code).stdout)
    return list(report["findings"])


def test_a_start_that_would_let_more_in_than_the_last_one_is_refused(real: Program, tmp_path: Path) -> None:
    keys = str(tmp_path / "keys.json")
    real("key", "create", "me", "--allow", "admin:*", "--file", keys)
    up(real, "--identities", keys, "--fronts", "0")
    assert up(real)["started"] is False, "it runs, and goes on as it is"
    assert "identities" in real("bucket", "ls", code=4).stderr
    real("down")
    refused = real("up", "--listen", real.env["FOREBAY_LISTEN"], code=2).stderr
    assert "open to everybody" in refused
    assert f"add --identities {keys}; or add --loosen" in refused
    foreground = real.process("node", "--listen", real.env["FOREBAY_LISTEN"])
    assert (foreground.communicate(timeout=60)[1].decode(), foreground.returncode) == (refused, 2)
    up(real, "--loosen", "--fronts", "0")
    real("bucket", "ls")
