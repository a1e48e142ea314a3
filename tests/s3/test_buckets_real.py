"""Buckets, ACLs, CORS, tags and forms on a real node with identities, through boto3 and plain HTTP."""

from __future__ import annotations

import hashlib
import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.s3.conftest import client
from tests.s3.real_node import RealNode

KEY_ID, SECRET, TOKEN = "AKIDADMINADMIN", "admin/secret", "operator-token"
ORIGIN = "https://app.example.com"
BIG = bytes(range(251)) * 40_000  # 10 MB


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    file = tmp_path_factory.mktemp("identities") / "identities.json"
    identities = [
        {"name": "admin", "access_key_id": KEY_ID, "secret_access_key": SECRET, "allow": "admin:*"},
        {"name": "operator", "token_sha256": hashlib.sha256(TOKEN.encode()).hexdigest(), "allow": "admin:*"},
    ]
    file.write_text(json.dumps({"identities": identities}))
    with RealNode(tmp_path_factory.mktemp("node"), "--identities", str(file), "--fronts", "2", token=TOKEN) as running:
        yield running


@pytest.fixture
def s3(node: RealNode) -> Any:
    return client(node.endpoint, KEY_ID, SECRET)


def code(caught: pytest.ExceptionInfo[ClientError]) -> tuple[int, str]:
    return caught.value.response["ResponseMetadata"]["HTTPStatusCode"], caught.value.response["Error"]["Code"]


def multipart(fields: dict[str, str], data: bytes) -> tuple[dict[str, str], bytes]:
    boundary = "----testboundary"
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    parts.append(f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="a.bin"\r\n\r\n'.encode())
    body = b"".join(parts) + data + f"\r\n--{boundary}--\r\n".encode()
    return {"content-type": f"multipart/form-data; boundary={boundary}"}, body


@pytest.mark.real
def test_a_bucket_lives_and_dies_by_boto3(node: RealNode, s3: Any) -> None:
    there = {"LocationConstraint": "eu-west-1"}
    s3.create_bucket(Bucket="fresh", CreateBucketConfiguration=there)
    with pytest.raises(ClientError) as caught:
        s3.create_bucket(Bucket="fresh", CreateBucketConfiguration=there)
    assert code(caught) == (409, "BucketAlreadyOwnedByYou")
    s3.put_object(Bucket="fresh", Key="k", Body=BIG)
    s3.create_bucket(Bucket="fresh")
    assert s3.get_object(Bucket="fresh", Key="k")["Body"].read() == BIG
    with pytest.raises(ClientError) as caught:
        s3.delete_bucket(Bucket="fresh")
    assert code(caught) == (409, "BucketNotEmpty")
    s3.delete_object(Bucket="fresh", Key="k")
    s3.delete_bucket(Bucket="fresh")
    with pytest.raises(ClientError) as caught:
        s3.head_bucket(Bucket="fresh")
    assert code(caught)[0] == 404


@pytest.mark.real
def test_what_is_written_back_keeps_its_bucket_until_it_is_flushed(node: RealNode, s3: Any, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    node.add_bucket("back", f"file://{place}", write="back")
    s3.put_object(Bucket="back", Key="k", Body=b"data")
    node.flush("back")
    s3.delete_bucket(Bucket="back")
    assert (place / "k").read_bytes() == b"data", "the backend keeps what it has"
    with pytest.raises(ClientError) as caught:
        s3.delete_bucket(Bucket="back")
    assert code(caught) == (404, "NoSuchBucket")


@pytest.mark.real
def test_tags_by_boto3(node: RealNode, s3: Any) -> None:
    s3.create_bucket(Bucket="tagged")
    for key, body in (("small", b"x"), ("big", BIG)):
        s3.put_object(Bucket="tagged", Key=key, Body=body, Tagging="stage=raw&by=me")
        before = s3.head_object(Bucket="tagged", Key=key)
        assert before["ResponseMetadata"]["HTTPHeaders"]["x-amz-tagging-count"] == "2"
        assert {t["Key"]: t["Value"] for t in s3.get_object_tagging(Bucket="tagged", Key=key)["TagSet"]} == {
            "stage": "raw", "by": "me",
        }  # fmt: skip
        s3.put_object_tagging(
            Bucket="tagged", Key=key, Tagging={"TagSet": [{"Key": "stage", "Value": "done & dusted".replace("&", "+")}]}
        )
        after = s3.head_object(Bucket="tagged", Key=key)
        assert after["ResponseMetadata"]["HTTPHeaders"]["x-amz-tagging-count"] == "1"
        assert (after["ETag"], after["LastModified"]) == (before["ETag"], before["LastModified"])
        assert s3.get_object(Bucket="tagged", Key=key)["Body"].read() == body
        s3.copy_object(Bucket="tagged", Key=f"{key}-copy", CopySource={"Bucket": "tagged", "Key": key})
        (tag,) = s3.get_object_tagging(Bucket="tagged", Key=f"{key}-copy")["TagSet"]
        assert tag == {"Key": "stage", "Value": "done + dusted"}
        s3.delete_object_tagging(Bucket="tagged", Key=key)
        assert s3.get_object_tagging(Bucket="tagged", Key=key)["TagSet"] == []


@pytest.mark.real
def test_a_public_bucket_and_its_rules(node: RealNode, s3: Any) -> None:
    s3.create_bucket(Bucket="public", ACL="public-read")
    s3.put_object(Bucket="public", Key="k", Body=b"for all")
    assert node.ask("GET", "/public/k")[2] == b"for all"
    assert node.ask("GET", "/public?list-type=2")[0] == 200
    assert node.ask("PUT", "/public/k", body=b"mine")[0] == 403
    assert node.ask("GET", "/public/k?versionId=v1")[0] == 403, "what was replaced or deleted is public no more"
    assert len(s3.get_bucket_acl(Bucket="public")["Grants"]) == 2
    rules = [{"AllowedOrigins": [ORIGIN], "AllowedMethods": ["GET", "PUT"], "AllowedHeaders": ["*"]}]
    s3.put_bucket_cors(Bucket="public", CORSConfiguration={"CORSRules": rules})
    assert s3.get_bucket_cors(Bucket="public")["CORSRules"] == rules
    asked = {"origin": ORIGIN, "access-control-request-method": "PUT", "access-control-request-headers": "x-amz-date"}
    status, headers, _ = node.ask("OPTIONS", "/public/k", asked)
    assert (status, headers["access-control-allow-origin"]) == (200, ORIGIN)
    status, headers, body = node.ask("GET", "/public/k", {"origin": ORIGIN})
    assert (status, body, headers["access-control-allow-origin"]) == (200, b"for all", ORIGIN)
    assert "vary" not in node.ask("GET", "/public/k")[1]
    status, headers, _ = node.ask("PUT", "/public/k", {"origin": ORIGIN}, b"mine")
    assert (status, headers["access-control-allow-origin"]) == (403, ORIGIN), "the page may read the error"
    s3.put_bucket_acl(Bucket="public", ACL="private")
    assert node.ask("GET", "/public/k")[0] == 403
    s3.delete_bucket_cors(Bucket="public")
    assert node.ask("OPTIONS", "/public/k", asked)[0] == 403


@pytest.mark.real
def test_a_form_that_boto3_signed_uploads_a_file(node: RealNode, s3: Any) -> None:
    s3.create_bucket(Bucket="forms")
    made = s3.generate_presigned_post(
        "forms", "in/${filename}", {"success_action_status": "201"},
        [{"success_action_status": "201"}, ["content-length-range", 0, len(BIG)]],
    )  # fmt: skip
    target = urllib.parse.urlsplit(made["url"]).path
    headers, body = multipart(made["fields"], BIG)
    status, _, said = node.ask("POST", target, headers, body)
    assert (status, b"<Key>in/a.bin</Key>" in said) == (201, True)
    assert s3.get_object(Bucket="forms", Key="in/a.bin")["Body"].read() == BIG
    headers, body = multipart(made["fields"] | {"key": "out/${filename}"}, b"x")
    assert node.ask("POST", target, headers, body)[0] == 403
    headers, body = multipart(made["fields"], BIG + b"x")
    status, _, said = node.ask("POST", target, headers, body)
    assert (status, b"EntityTooLarge" in said) == (400, True)
    assert [found["Key"] for found in s3.list_objects_v2(Bucket="forms")["Contents"]] == ["in/a.bin"]
    left = list(node.dir.glob("volumes/*/tmp/*"))
    assert left == [], "no bytes of refused forms are left"
