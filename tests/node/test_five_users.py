"""Two teams, a reader, a Prometheus and a person of an OIDC issuer share a node, and nobody is told another's names.

Team A makes a bucket of its own. Team B has a folder of a shared one. The reader may read both. Prometheus sees how
the node does, and no object. The person of the issuer has a folder of the shared bucket by a claim, through temporary
keys and as a bearer. Everything that a user can ask for is asked, and each answer is searched for what is not theirs:
names of objects are in it for nobody else, and names of buckets only for whoever has a grant there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from bench import servers
from forebay.client.sync import Client
from forebay.core.errors import Denied, ForebayError
from tests.node.test_oidc import AUDIENCE, keys_of, s3_with, until_known
from tests.patience import until
from tests.s3.real_node import RealNode

pytestmark = pytest.mark.real

# What only its owner has in names and bytes: nobody else's answer may have it.
AMBER, BASALT, CORAL = "amber", "basalt", "coral"
USERS = ("alpha", "beta", "reader", "prometheus", "olga")
HIDDEN = {
    "alpha": (BASALT, CORAL, "pond"),
    "beta": (AMBER, CORAL, "alpha-own"),
    "reader": (CORAL,),
    "prometheus": (AMBER, BASALT, CORAL),
    "olga": (AMBER, BASALT, "alpha-own"),
}


class Shared:
    """The node, and what each user proves itself with."""

    def __init__(self, node: RealNode, issuer: servers.Issuer, audit: Path) -> None:
        self.node = node
        self.audit = audit
        self.tokens = {name: name for name in (*USERS, "operator")}
        self.tokens["olga"] = until_known(node, issuer.token("ann", AUDIENCE))
        self.s3: dict[str, Any] = {name: self._static(name) for name in USERS if name != "olga"}
        self.s3["olga"] = s3_with(node, keys_of(node, self.tokens["olga"]))

    def _static(self, name: str) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.node.endpoint,
            region_name="us-east-1",
            aws_access_key_id=f"AK{name}",
            aws_secret_access_key=f"secret-{name}",
            config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
        )

    def client(self, name: str) -> Client:
        return Client(self.node.endpoint, token=self.tokens[name])

    def said(self, name: str, target: str) -> tuple[int, str]:
        """One native request: status and the whole answer, headers too."""
        status, headers, body = self.node.ask("GET", target, {"Authorization": f"Bearer {self.tokens[name]}"})
        return status, f"{headers} {body.decode('utf-8', 'replace')}"


@pytest.fixture(scope="module")
def shared(issuer: servers.Issuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """A node with a bucket `pond` of three folders; team A's bucket is made by team A."""
    root = tmp_path_factory.mktemp("five")
    allow = {
        "operator": "admin:*",
        "alpha": "create:alpha-*",
        "beta": "read:pond/beta/,write:pond/beta/",
        "reader": "read:alpha-*,read:pond/beta/",
        "prometheus": "observe:*",
    }
    entries = [
        {"name": n, "token": n, "access_key_id": f"AK{n}", "secret_access_key": f"secret-{n}", "allow": grants}
        for n, grants in allow.items()
    ]
    rules = [{"claim": "groups", "value": "team-a", "allow": "read:pond/olga/,write:pond/olga/"}]
    oidc = [{"name": "corp", "issuer": issuer.url, "audience": AUDIENCE, "rules": rules}]
    identities = root / "identities.json"
    identities.write_text(json.dumps({"identities": entries, "oidc": oidc}))
    identities.chmod(0o600)
    flags = ("--fronts", "2", "--identities", str(identities), "--audit", "changes")
    with RealNode(root / "n", *flags, token="operator") as node:
        (root / "pond").mkdir()
        node.add_bucket("pond", f"file://{root / 'pond'}", write="back")
        yield Shared(node, issuer, root / "n" / "log")


def test_each_does_its_work_and_is_told_nothing_of_the_others(shared: Shared) -> None:
    s3 = shared.s3
    s3["alpha"].create_bucket(Bucket="alpha-own")
    s3["alpha"].put_object(Bucket="alpha-own", Key=f"x/{AMBER}", Body=AMBER.encode() * 5000)
    s3["beta"].put_object(Bucket="pond", Key=f"beta/{BASALT}", Body=BASALT.encode() * 5000)
    s3["olga"].put_object(Bucket="pond", Key=f"olga/{CORAL}", Body=CORAL.encode() * 5000)
    with shared.client("olga") as olga:
        olga.put("pond", f"olga/{CORAL}-native", b"as a bearer")
        assert len(olga.get("pond", f"olga/{CORAL}")) == 5000 * len(CORAL)
    with shared.client("reader") as reader:
        assert len(reader.get("alpha-own", f"x/{AMBER}")) == 5000 * len(AMBER)
        assert len(reader.get("pond", f"beta/{BASALT}")) == 5000 * len(BASALT)
        with pytest.raises(Denied):
            reader.put("pond", "beta/x", b"no")
        reader.start_job("prefetch", "alpha-own", "x/")
    with shared.client("beta") as beta:
        beta.start_job("prefetch", "pond", f"beta/{BASALT}")
    for name in USERS:
        found = "\n".join([*everything_native(shared, name), *everything_s3(shared, name)])
        for word in HIDDEN[name]:
            at = found.find(word)
            assert at < 0, f"{name} is told of {word!r}: …{found[max(0, at - 200) : at + 80]}…"
    status, metrics = shared.said("prometheus", "/-/metrics")
    assert status == 200
    assert re.search(r'forebay_\w+\{[^}]*bucket="pond"', metrics), "Prometheus sees how buckets do"


def everything_native(shared: Shared, name: str) -> Iterator[str]:
    """What the native API answers to this user about everything that is there."""
    for target in ("/-/v1/buckets", "/-/v1/status", "/-/metrics", "/-/v1/jobs", "/-/v1/map"):
        yield shared.said(name, target)[1]
    with shared.client(name) as client:
        for state in client.jobs():
            yield repr(client.job(state.job))
    for bucket in ("pond", "alpha-own"):
        for prefix in ("", "beta/", "olga/", "x/", "b"):
            for target in (f"list/{bucket}?prefix={prefix}", f"list/{bucket}?prefix={prefix}&cached=1",
                           f"listing/{bucket}?prefix={prefix}", f"lost/{bucket}?prefix={prefix}"):  # fmt: skip
                status, text = shared.said(name, f"/-/v1/{target}")
                yield text if status == 200 else text.replace(bucket, "what was asked for")


def everything_s3(shared: Shared, name: str) -> Iterator[str]:
    """What the S3 API does."""
    s3 = shared.s3[name]
    yield repr(s3.list_buckets().get("Buckets"))
    for bucket in ("pond", "alpha-own"):
        for call in (s3.list_objects_v2, s3.list_objects, s3.list_multipart_uploads):
            try:
                yield repr(call(Bucket=bucket).get("Contents"))
            except ClientError as error:
                yield str(error.response["Error"]["Message"]).replace(bucket, "what was asked for")


def test_the_others_things_cannot_be_read_changed_or_taken(shared: Shared) -> None:
    foreign = {
        "alpha": [("pond", f"beta/{BASALT}"), ("pond", f"olga/{CORAL}")],
        "beta": [("alpha-own", f"x/{AMBER}"), ("pond", f"olga/{CORAL}")],
        "reader": [("pond", f"olga/{CORAL}")],
        "prometheus": [("pond", f"beta/{BASALT}"), ("alpha-own", f"x/{AMBER}")],
        "olga": [("pond", f"beta/{BASALT}"), ("alpha-own", f"x/{AMBER}")],
    }
    for name, places in foreign.items():
        s3 = shared.s3[name]
        with shared.client(name) as client:
            for bucket, key in places:
                calls = (
                    lambda c=client, b=bucket, k=key: c.get(b, k),
                    lambda c=client, b=bucket, k=key: c.put(b, k, b"x"),
                    lambda c=client, b=bucket, k=key: c.delete(b, k),
                    lambda c=client, b=bucket, k=key: c.stat(b, k),
                    lambda c=client, b=bucket, k=key: c.start_job("evict", b, keys=(k,)),
                    lambda c=client, b=bucket, k=key: c.get_many([(b, k)])[0],
                    lambda s=s3, b=bucket, k=key: s.get_object(Bucket=b, Key=k),
                    lambda s=s3, b=bucket, k=key: s.put_object(Bucket=b, Key=k, Body=b"x"),
                    lambda s=s3, b=bucket, k=key: s.delete_object(Bucket=b, Key=k),
                )
                for number, call in enumerate(calls):
                    with pytest.raises((ForebayError, ClientError)) as caught:
                        call()
                    code = getattr(caught.value, "response", {}).get("Error", {}).get("Code") or caught.type.__name__
                    assert code in ("AccessDenied", "Denied", "NotFound", "NoSuchBucket"), (name, bucket, number, code)
    with shared.client("operator") as operator:
        assert operator.get("pond", f"beta/{BASALT}") == BASALT.encode() * 5000
        assert operator.get("alpha-own", f"x/{AMBER}") == AMBER.encode() * 5000

    def refused() -> set[str]:
        lines = [line for path in shared.audit.glob("audit-*.jsonl") for line in path.read_text().splitlines()]
        return {str(line.get("identity")) for line in map(json.loads, lines) if line.get("status") == 403}

    until(lambda: {"alpha", "beta", "reader", "prometheus"} <= refused(), "the audit log says who tried")
