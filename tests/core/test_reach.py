"""Where a bucket that is held may send the node: patterns, options, addresses, and all the ways around them."""

from __future__ import annotations

import json

import pytest

from forebay.backends.locate import OPTIONS
from forebay.core.errors import Denied, ForebayError, Invalid
from forebay.core.reach import Reach, is_inner, place_of
from forebay.core.types import Bucket

KEYS = {"access_key_id": "A", "secret_access_key": "s"}


def allows(pattern: str, url: str, bucket: str = "team-a") -> bool:
    return Reach([pattern]).allows(bucket, url)


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("s3://team-*", ["s3://team-a", "s3://team-a/x/", "s3://team-"],
         ["s3://team", "s3://other/team-a", "gs://team-a"]),
        ("s3://shared/team-a", ["s3://shared/team-a", "s3://shared/team-a/", "s3://shared/team-a/x"],
         ["s3://shared", "s3://shared/", "s3://shared/team-ab", "s3://shared/team-a%2Fx", "s3://shared/x/team-a"]),
        ("file:///data/{bucket}", ["file:///data/team-a", "file:///data/team-a/x"],
         ["file:///data", "file:///data/team-b", "file:///data/team-ab", "file:///", "file:///data//team-a"]),
        ("https://*.corp", ["https://a.corp/x", "https://A.CORP./", "https://a.corp:443"],
         ["https://a.corp:444", "http://a.corp", "https://corp", "https://a.corp.evil", "https://x/a.corp"]),
        ("http://minio:9000", ["http://minio:9000", "http://minio:9000/b"], ["http://minio", "http://minio:9001"]),
        ("http://minio:*", ["http://minio", "http://minio:1"], ["http://minio2:1"]),
        ("http://[::1]:80", ["http://[0:0::1]", "http://[::1]/"], ["http://[::2]"]),
    ],
)  # fmt: skip
def test_a_pattern_allows_what_begins_with_it(pattern: str, inside: list[str], outside: list[str]) -> None:
    assert [url for url in inside if not allows(pattern, url)] == []
    assert [url for url in outside if allows(pattern, url)] == []


@pytest.mark.parametrize(
    "url",
    [
        "http://minio:9000@evil", "http://minio:9000\\@evil", "http://evil#minio:9000", "http://evil?minio:9000",
        "http://minio:9000/../x", "http://minio:9000/%2e%2e/x", "file:///data/team-a/../team-b", "file://host/data",
        "file:///data/./x", "s3://", "s3:///x", "http://mi nio", "http://minio\n", "http:minio", "ftp://minio",
        "http://m\u3002corp", "http://[::1", "http://minio:x",
    ],
)  # fmt: skip
def test_what_can_be_read_in_two_ways_is_no_place(url: str) -> None:
    with pytest.raises(Invalid):
        place_of(url)


def test_an_empty_list_allows_buckets_without_a_backend_alone() -> None:
    Reach().check(Bucket("b", "local://", write="local", held=True))
    for url in ("s3://b", "file:///data", "memory://b", "https://host/x"):
        with pytest.raises(Denied, match="--allow-backend"):
            Reach().check(Bucket("b", url, options=KEYS if url == "s3://b" else {}, held=True))


def check(url: str, options: dict[str, str], *more: str) -> None:
    Reach(["s3://*", "gs://*", "az://*", "http://*", "https://*", *more]).check(
        Bucket("team-a", url, options=options, held=True)
    )


def test_credentials_come_with_the_bucket() -> None:
    service = json.dumps({"type": "service_account", "client_email": "e", "private_key": "k"})
    for url, good, bad in (
        ("s3://b", [KEYS, {"skip_signature": "True"}], [{}, {"region": "eu"}, {"access_key_id": "A"}]),
        ("gs://b", [{"bearer_token": "t"}, {"service_account_key": service}], [{}, {"skip_signature": "no"}]),
        ("az://b", [{"account_name": "a", "sas_token": "s"}], [{"account_name": "a"}, {"client_id": "managed"}]),
    ):
        for options in good:
            check(url, options)
        for options in bad:
            with pytest.raises(Invalid, match="own credentials"):
                check(url, options)


def test_no_option_leads_out_of_the_list_or_to_what_is_the_nodes() -> None:
    ways = {"s3": KEYS, "gs": {"bearer_token": "t"}, "az": {"account_name": "a", "account_key": "k"}}
    own = {
        "profile", "root_certificate", "proxy_url", "allow_invalid_certificates", "service_account",
        "application_credentials", "federated_token_file", "use_azure_cli", "authority_host",
    }  # fmt: skip
    refused = set()
    for scheme, options in OPTIONS.items():
        url = {"file": "file:///x", "memory": "memory://x", "local": "local://"}.get(scheme, f"{scheme}://b")
        for option in options:
            try:
                Reach([f"{scheme}://*", "file:///"] if scheme != "local" else ()).check(
                    Bucket("b", url, options={**ways.get(scheme, {}), option: "https://else"}, held=True)
                )
            except Denied:
                refused.add(option)
    assert refused == own | {"endpoint", "base_url"}
    check("s3://b", {**KEYS, "endpoint": "https://minio.corp:443"})
    with pytest.raises(Denied):
        check("s3://b", {**KEYS, "endpoint": "https://minio.corp:9000"})
    with pytest.raises(Denied, match="token_uri"):
        check("gs://b", {"service_account_key": json.dumps({"token_uri": "http://169.254.169.254/"})})


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.255.0.9", "0.0.0.0", "0.1.2.3", "169.254.169.254", "169.254.170.2", "100.100.100.200",
        "168.63.129.16", "224.0.0.1", "::1", "::", "fe80::1%eth0", "fd00:ec2::254", "fd20:ce::254", "ff02::1",
        "::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::",
    ],
)  # fmt: skip
def test_inner_addresses_in_all_their_forms(address: str) -> None:
    assert is_inner(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "192.168.1.1", "8.8.8.8", "2001:db8::1", "fd12::1", "::ffff:8.8.8.8"])
def test_other_addresses_are_the_lists_business(address: str) -> None:
    assert not is_inner(address)


def test_an_inner_address_takes_a_pattern_that_names_it() -> None:
    reach = Reach(["http://127.0.0.1:9000", "https://localhost", "http://*", "http://named", "http://[::1]:*/x"])
    assert reach.allows_inner("127.0.0.1", 9000)
    assert reach.allows_inner("127.0.0.1.", 9000)
    assert reach.allows_inner("localhost", 443)
    assert reach.allows_inner("::1", 5)
    for host, port in (
        ("127.0.0.1", 9001),
        ("127.0.0.2", 9000),
        ("named", 80),
        ("169.254.169.254", 80),
        ("2130706433", 80),
    ):
        assert not reach.allows_inner(host, port)


def test_a_pattern_that_cannot_be_read_is_said_at_the_start() -> None:
    for pattern in ("team-*", "s3:team", "local://", "*://x", "http://x:9*"):
        with pytest.raises(ForebayError):
            Reach([pattern])
