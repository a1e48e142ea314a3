"""Temporary keys and bearer tokens at a real node, from a real issuer, by real clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import botocore.exceptions
import pytest
from botocore import UNSIGNED
from typer.testing import CliRunner

from bench import servers
from forebay.cli.main import app
from forebay.client.sync import Client
from forebay.core.errors import Denied, Unavailable
from tests.patience import until
from tests.s3.real_node import RealNode

AUDIENCE = "urn:forebay"
ROLE = "arn:aws:iam::000000000000:role/any"
RULES = [
    {"claim": "groups", "value": "team-a", "allow": "admin:team-a"},
    {"claim": "groups", "value": "team-b", "allow": "admin:team-b,read:team-a"},
]
pytestmark = pytest.mark.real


def write_identities(path: Path, issuer: servers.Issuer, **changed: Any) -> None:
    """One operator, and the issuer."""
    entry = {"name": "corp", "issuer": issuer.url, "audience": AUDIENCE, "rules": RULES, **changed}
    operator = {"name": "operator", "token": "op", "allow": "admin:*"}
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"identities": [operator], "oidc": [entry] if entry["rules"] else []}))
    new.chmod(0o600)
    new.replace(path)


@pytest.fixture(scope="module")
def place(issuer: servers.Issuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealNode, Path]]:
    """A node with two fronts that trusts the issuer, and its identities file."""
    directory = tmp_path_factory.mktemp("oidc")
    identities = directory / "identities.json"
    write_identities(identities, issuer)
    with RealNode(
        directory / "n", "--fronts", "2", "--identities", str(identities), "--audit", "changes", token="op"
    ) as node:
        for name in ("team-a", "team-b"):
            node.add_bucket(name, "local://", write="local")
        yield node, identities


@pytest.fixture
def node(place: tuple[RealNode, Path]) -> RealNode:
    return place[0]


def sts_of(node: RealNode) -> Any:
    unsigned = botocore.config.Config(signature_version=UNSIGNED)
    return boto3.client("sts", endpoint_url=node.endpoint, region_name="us-east-1", config=unsigned)


def keys_of(node: RealNode, token: str, **more: Any) -> dict[str, str]:
    """Temporary keys, as boto3 gets them."""
    answer = sts_of(node).assume_role_with_web_identity(
        RoleArn=ROLE, RoleSessionName="test", WebIdentityToken=token, **more
    )
    found: dict[str, str] = answer["Credentials"]
    return found


def s3_with(node: RealNode, keys: dict[str, str], **config: Any) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=node.endpoint,
        region_name="us-east-1",
        aws_access_key_id=keys["AccessKeyId"],
        aws_secret_access_key=keys["SecretAccessKey"],
        aws_session_token=keys["SessionToken"],
        config=botocore.config.Config(retries={"total_max_attempts": 1}, **config),
    )


def code_of(call: Callable[[], Any]) -> str:
    with pytest.raises(botocore.exceptions.ClientError) as caught:
        call()
    return str(caught.value.response["Error"]["Code"])


def test_temporary_keys_work_everywhere_and_see_their_own(node: RealNode, issuer: servers.Issuer) -> None:
    keys = keys_of(node, until_known(node, issuer.token("ann", AUDIENCE)))
    s3 = s3_with(node, keys)
    s3.put_object(Bucket="team-a", Key="k", Body=b"x" * 100_000)
    for _ in range(8):  # connections go to both fronts
        assert s3_with(node, keys).get_object(Bucket="team-a", Key="k")["Body"].read() == b"x" * 100_000
    assert [one["Name"] for one in s3.list_buckets()["Buckets"]] == ["team-a"]
    assert code_of(lambda: s3.get_object(Bucket="team-b", Key="k")) == "AccessDenied"
    for version in ("s3v4", "s3"):
        presigner = s3_with(node, keys, signature_version=version)
        url = presigner.generate_presigned_url("get_object", Params={"Bucket": "team-a", "Key": "k"})
        assert node.ask("GET", url.removeprefix(node.endpoint))[2] == b"x" * 100_000
        form = presigner.generate_presigned_post("team-a", "form")
        kind = {"content-type": "multipart/form-data; boundary=b"}
        status, _, said = node.ask("POST", "/team-a", kind, form_body({**form["fields"], "file": "from a form"}))
        assert status == 204, said
        assert s3.get_object(Bucket="team-a", Key="form")["Body"].read() == b"from a form"
    upload = {"Bucket": "team-a", "Key": "m", "UploadId": ""}
    upload["UploadId"] = s3.create_multipart_upload(Bucket="team-a", Key="m")["UploadId"]
    part = s3.upload_part(**upload, PartNumber=1, Body=b"p")
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]})


def form_body(fields: dict[str, str]) -> bytes:
    """Fields as a browser sends them, between lines of `b`."""
    parts = (f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in fields.items())
    return ("".join(parts) + "--b--\r\n").encode()


def until_known(node: RealNode, token: str) -> str:
    """`token`, once the node has heard the issuer's keys."""

    def is_known() -> bool:
        try:
            with Client(node.endpoint, token=token) as client:
                client.buckets()
            return True
        except Unavailable:
            return False

    until(is_known, "the issuer's keys are known")
    return token


def test_bearers_of_tokens_use_the_native_api(node: RealNode, issuer: servers.Issuer) -> None:
    with Client(node.endpoint, token=until_known(node, issuer.token("bob", AUDIENCE))) as bob:
        bob.put("team-b", "k", b"bob's")
        assert bob.get("team-b", "k") == b"bob's"
        assert sorted(bucket.name for bucket in bob.buckets()) == ["team-a", "team-b"]
        with pytest.raises(Denied, match="oidc:corp:bob"):
            bob.put("team-a", "k", b"")
    for token, words in (
        (issuer.token("eve", AUDIENCE), "no rule lets them"),
        (issuer.token("ann", "urn:other"), "made for others"),
    ):
        with Client(node.endpoint, token=token) as client, pytest.raises(Denied, match=words):
            client.buckets()


def test_a_program_needs_nothing_but_its_environment(node: RealNode, issuer: servers.Issuer, tmp_path: Path) -> None:
    """As a pod has it: a file with a token, a role, and where STS and S3 are."""
    file = tmp_path / "token"
    file.write_text(until_known(node, issuer.token("ann", AUDIENCE)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | {
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(file),
        "AWS_ROLE_ARN": ROLE,
        "AWS_ENDPOINT_URL_STS": node.endpoint,
        "AWS_ENDPOINT_URL_S3": node.endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    program = (
        "import boto3; s = boto3.client('s3'); s.put_object(Bucket='team-a', Key='pod', Body=b'1');"
        "print(s.get_object(Bucket='team-a', Key='pod')['Body'].read())"
    )
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert said.stdout.strip() == "b'1'", said.stderr


def test_sts_says_what_is_wrong_as_aws_does(node: RealNode, issuer: servers.Issuer) -> None:
    good = until_known(node, issuer.token("ann", AUDIENCE))
    for token, code in (
        ("not-a-token", "InvalidIdentityToken"),
        (issuer.token("ann", "urn:other"), "InvalidIdentityToken"),
        (issuer.token("eve", AUDIENCE), "AccessDenied"),
        ("x" * 19_000, "InvalidIdentityToken"),
    ):
        assert code_of(lambda token=token: keys_of(node, token)) == code  # type: ignore[misc]
    assert code_of(lambda: keys_of(node, good, Policy="{}")) == "ValidationError"
    assert code_of(lambda: sts_of(node).get_caller_identity()) == "InvalidAction"
    status, headers, body = node.ask("POST", "/", {"content-type": "application/x-www-form-urlencoded"}, b"x" * 40_000)
    assert (status, b"EntityTooLarge" in body or b"ValidationError" in body) == (400, True) or status == 413
    asked = f"/?Action=AssumeRoleWithWebIdentity&RoleArn=any&RoleSessionName=me&WebIdentityToken={good}"
    status, headers, body = node.ask("POST", asked)  # as minio-py asks
    assert (status, b"<SecretAccessKey>" in body, headers["cache-control"]) == (200, True, "no-store")


def test_keys_outlive_a_restart_but_not_their_rule(place: tuple[RealNode, Path], issuer: servers.Issuer) -> None:
    node, identities = place
    token = until_known(node, issuer.token("bob", AUDIENCE))
    keys = keys_of(node, token)
    s3_with(node, keys).put_object(Bucket="team-b", Key="r", Body=b"r")
    node.stop()
    issuer.kill()  # and the issuer is away: what the node knew of it goes on
    try:
        node.start()
        assert s3_with(node, keys).get_object(Bucket="team-b", Key="r")["Body"].read() == b"r"
        with Client(node.endpoint, token=token) as bob:
            assert bob.get("team-b", "r") == b"r"
    finally:
        issuer.restart()
    change(node, identities, issuer, rules=RULES[:1])
    until(lambda: _is_refused(lambda: s3_with(node, keys).get_object(Bucket="team-b", Key="r")), "the keys end")
    with Client(node.endpoint, token=token) as bob, pytest.raises(Denied, match="no rule lets them"):
        bob.buckets()
    change(node, identities, issuer, rules=[])
    ann = issuer.token("ann", AUDIENCE)

    def is_out() -> bool:
        with Client(node.endpoint, token=ann) as client:
            return _is_refused(client.buckets)

    until(is_out, "nobody of the issuer is let in")
    change(node, identities, issuer)
    until(lambda: not is_out(), "the issuer is trusted again")


def test_what_leaked_is_ended_at_every_front_and_stays_so(place: tuple[RealNode, Path], issuer: servers.Issuer) -> None:
    node, identities = place
    token, other_person = (until_known(node, issuer.token(name, AUDIENCE)) for name in ("ann", "bob"))
    leaked, other = keys_of(node, token), keys_of(node, token, DurationSeconds=1800)
    s3_with(node, other).put_object(Bucket="team-a", Key="e", Body=b"e")
    url = s3_with(node, leaked).generate_presigned_url("get_object", Params={"Bucket": "team-a", "Key": "e"})
    path = url.removeprefix(node.endpoint)
    assert node.ask("GET", path)[0] == 200

    def end(what: str) -> None:
        assert CliRunner().invoke(app, ["key", "end", what, "--file", str(identities)]).exit_code == 0

    def is_out(keys: dict[str, str]) -> bool:  # connections go to both fronts
        return all(_is_refused(lambda: s3_with(node, keys).get_object(Bucket="team-a", Key="e")) for _ in range(8))

    end(leaked["AccessKeyId"])
    until(lambda: is_out(leaked), "the keys are worth nothing, at every front")
    assert code_of(lambda: s3_with(node, leaked).list_buckets()) == "AccessDenied"
    assert node.ask("GET", path)[0] == 403
    assert s3_with(node, other).get_object(Bucket="team-a", Key="e")["Body"].read() == b"e"
    told = [line for file in (node.dir / "log").glob("audit-*.jsonl") for line in file.read_text().splitlines()]
    denied = [line for line in map(json.loads, told) if (line.get("status"), line.get("key")) == (403, "e")]
    assert denied, "such denials are audited"
    assert f"ended: {leaked['AccessKeyId']}" in (node.dir / "stderr.log").read_text()
    node.stop()
    node.start()
    until_known(node, other_person)
    assert is_out(leaked)
    assert not is_out(other)
    end("oidc:corp:ann")
    until(lambda: is_out(other), "all that ann had is worth nothing")
    with Client(node.endpoint, token=token) as ann, pytest.raises(Denied, match="ended before its time"):
        ann.buckets()
    assert code_of(lambda: keys_of(node, token)) == "InvalidIdentityToken"
    with Client(node.endpoint, token=other_person) as bob:
        assert bob.get("team-a", "e") == b"e"
    change(node, identities, issuer)
    until(lambda: not is_out(other), "what was ended works again")


def change(node: RealNode, identities: Path, issuer: servers.Issuer, **changed: Any) -> None:
    """Change the file, and tell the node so."""
    write_identities(identities, issuer, **changed)
    os.kill(json.loads((node.dir / "run" / "node.json").read_text())["pid"], signal.SIGHUP)


def _is_refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except (botocore.exceptions.ClientError, Denied):
        return True
    except Unavailable:
        return False
    return False


def test_an_issuer_may_change_its_keys(node: RealNode, issuer: servers.Issuer) -> None:
    before = until_known(node, issuer.token("ann", AUDIENCE))
    issuer.change_keys()

    def is_known() -> bool:
        try:
            with Client(node.endpoint, token=issuer.token("ann", AUDIENCE)) as client:
                return bool(client.buckets())
        except (Denied, Unavailable):
            return False

    until(is_known, "the new key is known")
    with Client(node.endpoint, token=before) as client:
        until(lambda: _is_refused(client.buckets), "what the old key signed lets nobody in")
