"""Two teams in one bucket of a real node, each let in by prefix; and buckets that belong to who made them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from forebay.client.sync import Client
from forebay.core.errors import Denied
from tests.patience import until

from .conftest import NodeProcess
from .test_who_sees import put

Make = Callable[..., NodeProcess]
OURS = "team-a/own.bin"
NOT_OURS = (
    "team-b/theirs.bin", "team-ab/theirs.bin", "theirs.bin", "team-a", "TEAM-A/own.bin", "/team-a/own.bin",
    "team-a/../team-b/theirs.bin", "team-a/./own.bin", "team-a/..", "team-a\\own.bin", "team-a/..\\x",
    "team-a%2Fown.bin",
    "te\N{CYRILLIC SMALL LETTER A}m-a/own.bin", "team\N{HYPHEN}a/own.bin", "team-a\0/x", " team-a/own.bin",
    "team-a\n/x", "\ufeffteam-a/own.bin", "team-a\u200b/own.bin",
)  # fmt: skip
PREFIXES_NOT_OURS = (
    "",
    "team",
    "team-",
    "team-a",
    "team-b/",
    "team-ab/",
    "team-a/../",
    "team-a/../team-b/",
    "/",
    "TEAM-A/",
)
HIDDEN = ("hush", "secret of b")  # in names and bytes that nobody asks for by name


def write_identities(path: Path, **allow: str) -> None:
    """A file of identities, each with its name as its token and key."""
    entries = [
        {"name": name, "token": name, "access_key_id": f"AK{name}", "secret_access_key": name, "allow": grants}
        for name, grants in allow.items()
    ]
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"identities": entries}))
    new.chmod(0o600)
    new.replace(path)


def s3_of(node: NodeProcess, name: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=node.endpoint,
        region_name="us-east-1",
        aws_access_key_id=f"AK{name}",
        aws_secret_access_key=name,
        config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}, signature_version="s3v4"),
    )


def code_of(call: Callable[..., Any], **arguments: Any) -> str:
    """The error code of a call, "" if it went well."""
    try:
        call(**arguments)
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return ""


def tar_of(name: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size = 4
        tar.addfile(member, io.BytesIO(b"data"))
    return made.getvalue()


class Lake:
    """A node whose bucket `lake` two teams share."""

    def __init__(self, node: NodeProcess, root: Path) -> None:
        self.data = root / "lake"
        for folder in ("team-a", "team-b", "team-ab"):
            (self.data / folder).mkdir(parents=True)
            (self.data / folder / "shard.tar").write_bytes(tar_of(f"{folder}.txt"))
        (self.data / OURS).write_bytes(b"ours")
        for folder in ("team-b", "team-ab", "."):
            (self.data / folder / "theirs.bin").write_bytes(b"secret of b")
            (self.data / folder / "hush.bin").write_bytes(b"secret of b")
        write_identities(
            root / "identities.json",
            root="admin:*",
            a="read:lake/team-a/,write:la*/team-a/",
            b="read:lake/team-b/,write:lake/team-b/",
            lead="admin:lake/team-a/",
            most="read:lake,write:lake/team-a/",
        )
        self.node = node
        node.start()
        status, said = put(self.node, "lake", f"file://{self.data}", "root", freshness_s=1e9, options={})
        assert status == 200, said
        for path in sorted(self.data.rglob("*.*")):
            key = path.relative_to(self.data).as_posix()
            assert self.ask("root", "GET", f"objects/lake/{key}")[0] == 200

    def ask(self, token: str, method: str, target: str, body: Any = None) -> tuple[int, str]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}"}
        status, answer = self.node.ask(method, f"/-/v1/{target}", headers, data)
        return status, answer.decode("utf-8", "replace")

    def files(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.data)): path.read_bytes() for path in self.data.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    """One for all stories here."""
    root = tmp_path_factory.mktemp("prefixes")
    one = NodeProcess(root / "one", "--identities", str(root / "identities.json"), "--fronts", "1")
    try:
        yield Lake(one, root)
    finally:
        one.stop()


@pytest.fixture
def lake(made: Lake) -> Lake:
    assert made.ask("root", "PUT", f"objects/lake/{OURS}", b"ours")[0] == 200
    assert made.ask("root", "GET", f"objects/lake/{OURS}")[1] == "ours"
    return made


def on_a_key(key: str) -> list[tuple[str, str, Any]]:
    """Every request of the native API that names a key: method, target, body."""
    at = f"lake/{quote(key, safe='/')}"
    copy = {"source_bucket": "lake", "source_key": OURS, "bucket": "lake", "key": key}
    completion = {"parts": [{"number": 1, "etag": "x"}]}
    return [
        ("GET", f"objects/{at}", None), ("HEAD", f"objects/{at}", None), ("GET", f"stat/{at}", None),
        ("GET", f"objects/{at}?member=team-b.txt", None), ("GET", f"members/{at}", None),
        ("GET", f"members/{at}?format=json", None), ("POST", f"members/{at}?name=x", b"data"),
        ("PUT", f"objects/{at}", b"new"), ("DELETE", f"objects/{at}", None),
        ("POST", f"copy/{at}", copy), ("POST", f"uploads/{at}", None), ("GET", f"uploads/{at}?upload_id=u", None),
        ("DELETE", f"uploads/{at}?upload_id=u", None), ("PUT", f"parts/{at}?upload_id=u&number=1", b"part"),
        ("POST", f"complete/{at}?upload_id=u", completion),
        ("POST", "copy/lake/team-a/copied", {**copy, "source_key": key, "key": "team-a/copied"}),
        *(("POST", verb, {"bucket": "lake", "keys": [OURS, key]})
          for verb in ("prefetch", "refresh", "flush", "pin", "unpin", "evict")),
        ("POST", "lost/give-up", {"bucket": "lake", "keys": [OURS, key]}),
    ]  # fmt: skip


def on_a_prefix(prefix: str) -> list[tuple[str, str, Any]]:
    """Every request of the native API that names a prefix."""
    query = f"prefix={quote(prefix, safe='')}"
    hints = {"job": "j", "bucket": "lake", "prefix": prefix, "listing": "0", "start": 0, "accesses": ""}
    return [
        *(("GET", f"list/lake?{query}{more}", None)
          for more in ("", "&delimiter=/", "&cached=1", "&format=ndjson", "&start_after=team-a/zzz")),
        ("GET", f"listing/lake?{query}", None), ("GET", f"uploads/lake?{query}", None),
        ("GET", f"lost/lake?{query}", None),
        *(("POST", verb, {"bucket": "lake", "prefix": prefix, "dry_run": True})
          for verb in ("prefetch", "refresh", "flush", "pin", "unpin", "evict")),
        ("POST", "lost/give-up", {"bucket": "lake", "prefix": prefix}), ("POST", "hints/j", hints),
    ]  # fmt: skip


ADMINS_ALONE = ("pin", "unpin", "evict", "lost/give-up")


def test_the_native_api_gives_a_prefix_and_nothing_else(lake: Lake) -> None:
    before = lake.files()
    for token in ("a", "lead"):
        asked = [one for key in NOT_OURS for one in on_a_key(key)]
        asked += [one for prefix in PREFIXES_NOT_OURS for one in on_a_prefix(prefix)]
        for method, target, body in asked:
            status, said = lake.ask(token, method, target, body)
            assert status == 403, (token, method, target, body, said)
            assert not any(word in said for word in HIDDEN), (target, said)
        if token == "a":
            assert lake.files() == before
        for key in (OURS, "team-a/sub/x", "team-a/é", "team-a//x", "team-a/...", "team-a/a..b"):
            for method, target, body in [*on_a_key(key), *on_a_prefix(key)]:
                status, said = lake.ask(token, method, target, body)
                assert (status == 403) == (token == "a" and target in ADMINS_ALONE), (token, method, target, said)
                assert not any(word in said for word in HIDDEN), (target, said)
    after = lake.files()
    assert {name: after[name] for name in before if name != OURS} == {n: before[n] for n in before if n != OURS}
    assert lake.ask("b", "GET", f"objects/lake/{OURS}")[0] == 403
    assert lake.ask("b", "GET", "objects/lake/team-b/theirs.bin") == (200, "secret of b")


def test_what_is_about_the_whole_bucket_is_not_for_a_prefix(lake: Lake) -> None:
    for token in ("a", "lead"):
        for method, target in (
            ("GET", "list/lake"), ("GET", "listing/lake"), ("GET", "lost/lake"), ("GET", "uploads/lake"),
            ("GET", "buckets/lake/check"), ("DELETE", "buckets/lake"), ("GET", "list/lake?prefix=team-a%2F..%2F"),
            ("GET", "list/lake?prefix=&prefix=team-a/"), ("GET", "list/lake?prefix=team-b/&prefix=team-a/"),
        ):  # fmt: skip
            assert lake.ask(token, method, target)[0] == 403, (token, target)
        for twice in ("", "team-b/"):
            assert "theirs" not in lake.ask(token, "GET", f"list/lake?prefix=team-a/&prefix={twice}")[1], "one counts"
        assert put(lake.node, "lake", "local://", token, write="local")[0] == 403
        for target in ("status", "jobs", "buckets", "buckets/lake"):
            status, said = lake.ask(token, "GET", target)
            assert status == 200
            assert "hush" not in said
        assert '"lake"' not in lake.ask(token, "GET", "status")[1], "counters are of the whole bucket"
        assert "lake" not in lake.node.ask("GET", "/-/metrics", {"Authorization": f"Bearer {token}"})[1].decode()
    for prefix in ("team-a/", "team-b/"):
        assert lake.ask("root", "POST", "pin", {"bucket": "lake", "prefix": prefix})[0] == 202

    def pinned(token: str) -> list[str]:
        shown: list[str] = json.loads(lake.ask(token, "GET", "buckets/lake")[1]).get("pinned", [])
        assert shown == json.loads(lake.ask(token, "GET", "buckets")[1])[0].get("pinned", [])
        return shown

    assert [pinned(token) for token in ("a", "b", "root", "most")] == [
        ["team-a/"], ["team-b/"], ["team-a/", "team-b/"], ["team-a/", "team-b/"],
    ]  # fmt: skip
    assert lake.ask("most", "GET", "objects/lake/theirs.bin")[0] == 200, "the wider of two grants counts"
    assert lake.ask("most", "PUT", "objects/lake/theirs.bin", b"x")[0] == 403, "for its own verb"


def test_jobs_hints_and_listings_of_others_stay_theirs(lake: Lake) -> None:
    with Client(lake.node.endpoint, token="b") as b, Client(lake.node.endpoint, token="a") as a:
        theirs, ours = b.listing("lake", "team-b/"), a.listing("lake", "team-a/")
        assert ours.keys() == ["team-a/own.bin", "team-a/shard.tar"]
        hints = {"job": "j", "bucket": "lake", "start": 0, "accesses": ""}
        for prefix in ("team-a/", "team-a/own"):
            told = {**hints, "prefix": prefix, "listing": theirs.id}
            assert lake.ask("a", "POST", "hints/j", told)[0] == 404, "a listing is one of its own prefix"
            status, said = lake.ask("a", "GET", f"listing/lake?prefix={prefix}&id={theirs.id}")
            assert (status, "theirs" in said) == (412, False), "nor does it say what was there"
        assert lake.ask("b", "POST", "hints/j", {**hints, "prefix": "team-b/", "listing": theirs.id})[0] == 200
        assert lake.ask("a", "GET", "hints/j")[0] == 404
        job = b.start_job("prefetch", "lake", "team-b/").job
        wide = lake.ask("root", "POST", "evict", {"bucket": "lake", "keys": [OURS], "dry_run": True})[1]
        for token in ("a", "lead"):
            assert lake.ask(token, "GET", f"jobs/{job}")[0] == 404
            assert lake.ask(token, "GET", f"jobs/{json.loads(wide)['job']}")[0] == 404
        narrow = a.start_job("prefetch", "lake", "team-a/").job
        assert lake.ask("lead", "GET", f"jobs/{narrow}")[0] == 200, "who administers the prefix sees its jobs"
        items = [("lake", key) for key in (OURS, *NOT_OURS)]
        for client in (a, a):  # over the door, where there is one
            first, *others = client.get_many(items, on_error="report")
            assert bytes(first) == b"ours"  # type: ignore[arg-type]
            assert [type(other) for other in others] == [Denied] * len(NOT_OURS)
            status, said = lake.ask("a", "POST", "batch", {"items": [["lake", key] for key in (OURS, *NOT_OURS)]})
        assert (status, "ours" in said, "secret" in said) == (200, True, False)


def test_s3_gives_a_prefix_and_nothing_else(lake: Lake) -> None:
    a, b, before = s3_of(lake.node, "a"), s3_of(lake.node, "b"), lake.files()
    theirs = b.create_multipart_upload(Bucket="lake", Key="team-b/hush-upload")["UploadId"]
    own = a.create_multipart_upload(Bucket="lake", Key="team-a/parts")["UploadId"]
    for key in NOT_OURS:
        if key.startswith("/") or "\0" in key or "\n" in key:
            continue  # as the client would not send them
        at = {"Bucket": "lake", "Key": key}
        part = {"UploadId": theirs, "PartNumber": 1}
        source = {"CopySource": {"Bucket": "lake", "Key": key}}
        calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
            (a.get_object, at), (a.head_object, at), (a.put_object, {**at, "Body": b"x"}), (a.delete_object, at),
            (a.get_object_tagging, at), (a.put_object_tagging, {**at, "Tagging": {"TagSet": []}}),
            (a.delete_object_tagging, at), (a.get_object_acl, at), (a.create_multipart_upload, at),
            (a.get_object_attributes, {**at, "ObjectAttributes": ["ObjectSize"]}),
            (a.copy_object, {**at, "CopySource": {"Bucket": "lake", "Key": OURS}}),
            (a.copy_object, {"Bucket": "lake", "Key": "team-a/copied", **source}),
            (a.upload_part_copy, {"Bucket": "lake", "Key": "team-a/parts", "UploadId": own, "PartNumber": 1, **source}),
            (a.upload_part, {**at, **part, "Body": b"x"}), (a.list_parts, {**at, "UploadId": theirs}),
            (a.abort_multipart_upload, {**at, "UploadId": theirs}),
            (a.complete_multipart_upload, {**at, "UploadId": theirs, "MultipartUpload": {"Parts": []}}),
        ]  # fmt: skip
        for call, arguments in calls:
            assert code_of(call, **arguments) in ("AccessDenied", "403"), (call, arguments)
        for url in (a.generate_presigned_url("get_object", at), a.generate_presigned_url("put_object", at)):
            method = "PUT" if "put" in url else "GET"
            assert lake.node.ask(method, url.removeprefix(lake.node.endpoint))[0] == 403
    assert code_of(a.list_parts, Bucket="lake", Key=OURS, UploadId=theirs) == "NoSuchUpload", "an id opens no other key"
    for prefix in PREFIXES_NOT_OURS:
        for delimiter in ("", "/"):
            asked = {"Bucket": "lake", "Prefix": prefix, "Delimiter": delimiter}
            for call in (a.list_objects, a.list_objects_v2, a.list_object_versions, a.list_multipart_uploads):
                assert code_of(call, **asked) == "AccessDenied", (call, asked)
    uploads = {each["Key"] for each in a.list_multipart_uploads(Bucket="lake", Prefix="team-a/")["Uploads"]}
    assert "team-a/parts" in uploads
    assert all(key.startswith("team-a/") for key in uploads)
    listed = a.list_objects_v2(Bucket="lake", Prefix="team-a/", Delimiter="/", StartAfter="team")
    assert [each["Key"] for each in listed["Contents"]] == ["team-a/own.bin", "team-a/shard.tar"]
    found = a.delete_objects(Bucket="lake", Delete={"Objects": [{"Key": "team-a/gone"}, {"Key": "team-b/theirs.bin"}]})
    assert [each["Key"] for each in found["Deleted"]] == ["team-a/gone"]
    assert [(each["Key"], each["Code"]) for each in found["Errors"]] == [("team-b/theirs.bin", "AccessDenied")]
    for call in (
        a.get_bucket_acl, a.get_bucket_cors, a.get_bucket_policy, a.delete_bucket, a.get_bucket_policy_status,
        a.delete_bucket_cors,
    ):  # fmt: skip
        assert code_of(call, Bucket="lake") == "AccessDenied", call
    assert code_of(a.put_bucket_acl, Bucket="lake", ACL="public-read") == "AccessDenied"
    for call in (a.head_bucket, a.get_bucket_location, a.get_bucket_versioning):
        assert code_of(call, Bucket="lake") == "", "what programs ask before they begin"
    assert [bucket["Name"] for bucket in a.list_buckets()["Buckets"]] == ["lake"]
    assert post_form(lake, a, "team-b/theirs.bin") == post_form(lake, a, "team-a/../theirs.bin") == 403
    s3_of(lake.node, "root").put_bucket_acl(Bucket="lake", ACL="public-read")
    try:
        at = {"Bucket": "lake", "Key": "team-b/theirs.bin"}
        assert a.get_object(**at)["Body"].read() == b"secret of b", "what all may read, they may too"
        assert code_of(a.get_object, **at, VersionId="v1") == "AccessDenied", "and not what it was before"
    finally:
        s3_of(lake.node, "root").put_bucket_acl(Bucket="lake", ACL="private")
    assert lake.files() == before
    assert post_form(lake, a, "team-a/form") == 204
    a.put_object(Bucket="lake", Key="team-a/new", Body=b"x")
    a.copy_object(Bucket="lake", Key="team-a/copied", CopySource={"Bucket": "lake", "Key": OURS})
    assert a.get_object(Bucket="lake", Key="team-a/copied")["Body"].read() == b"ours"


def post_form(lake: Lake, client: Any, key: str) -> int:
    """The status of an upload by form, with a policy that allows just that key."""
    form = client.generate_presigned_post("lake", key)
    boundary, lines = "b0undary", []
    for name, value in form["fields"].items():
        lines += [f"--{boundary}", f'Content-Disposition: form-data; name="{name}"', "", value]
    lines += [
        f"--{boundary}",
        'Content-Disposition: form-data; name="file"; filename="f"',
        "",
        "bytes",
        f"--{boundary}--",
        "",
    ]
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    return lake.node.ask("POST", "/lake", headers, "\r\n".join(lines).encode())[0]


def test_buckets_belong_to_who_made_them(node: Make, tmp_path: Path) -> None:
    file, place = tmp_path / "identities.json", tmp_path / "one"
    allow = {"root": "admin:*", "ann": "create:scratch-*", "ben": "create:scratch-*", "cas": "read:scratch-*"}
    write_identities(file, **allow)
    one = node("--identities", str(file), "--fronts", "1", dir=place)
    ann, ben, root = (s3_of(one, name) for name in ("ann", "ben", "root"))
    assert code_of(ann.create_bucket, Bucket="corpus") == "AccessDenied"
    root.create_bucket(Bucket="scratch-of-root")
    for call in (ann.create_bucket, ben.create_bucket):
        assert code_of(call, Bucket="scratch-of-root") == "BucketAlreadyExists"
    ann.create_bucket(Bucket="scratch-ann")
    ann.create_bucket(Bucket="scratch-ann")  # programs begin with it
    ann.put_object(Bucket="scratch-ann", Key="hush", Body=b"anns")
    assert code_of(ben.create_bucket, Bucket="scratch-ann") == "BucketAlreadyExists"
    for name, options in (("local://", {"write": "local"}), (f"file://{tmp_path}", {}), ("s3://x", {})):
        assert put(one, "scratch-ann", name, "ben", **options)[0] == 409, name
        assert put(one, "scratch-ben", name, "ben", **options)[0] == (200 if options else 403), "within what is allowed"
    assert put(one, "scratch-ann", "local://", "ann", write="local", quota_bytes=1 << 30, owner="ben")[0] == 200
    assert put(one, "corpus", "local://", "ann", write="local")[0] == 403

    def check(node: NodeProcess) -> None:
        ann, ben = s3_of(node, "ann"), s3_of(node, "ben")
        assert [bucket["Name"] for bucket in ann.list_buckets()["Buckets"]] == ["scratch-ann"]
        assert [bucket["Name"] for bucket in ben.list_buckets()["Buckets"]] == ["scratch-ben"]
        assert ann.get_object(Bucket="scratch-ann", Key="hush")["Body"].read() == b"anns"
        ann.put_bucket_acl(Bucket="scratch-ann", ACL="private")
        for call, more in (
            (ben.get_object, {"Key": "hush"}), (ben.put_object, {"Key": "x"}), (ben.list_objects_v2, {}),
            (ben.delete_bucket, {}), (ben.put_bucket_acl, {"ACL": "public-read"}), (ben.get_bucket_acl, {}),
        ):  # fmt: skip
            assert code_of(call, Bucket="scratch-ann", **more) == "AccessDenied", call
        bearer = {"Authorization": "Bearer ben"}
        for target in ("/-/v1/buckets", "/-/v1/status", "/-/metrics", "/-/v1/jobs"):
            status, said = node.ask("GET", target, bearer)
            assert (status, b"scratch-ann" in said) == (200, False), target
        assert node.ask("GET", "/-/v1/buckets/scratch-ann", bearer)[0] == 403

    check(one)
    assert one.stop() == 0
    write_identities(file, **{name: grants for name, grants in allow.items() if name != "ann"})
    again = node("--identities", str(file), "--fronts", "1", dir=place)

    def reads(token: str) -> int:
        return again.ask("GET", "/-/v1/objects/scratch-ann/hush", {"Authorization": f"Bearer {token}"})[0]

    assert [reads(token) for token in ("ben", "cas", "root")] == [403, 200, 200], (
        "its maker is gone, and it is as it was"
    )
    write_identities(file, **allow)
    until(lambda: reads("ann") == 200, "an identity that is back")
    check(again)
    ann, ben = s3_of(again, "ann"), s3_of(again, "ben")
    ann.delete_object(Bucket="scratch-ann", Key="hush")
    ann.delete_bucket(Bucket="scratch-ann")
    ben.create_bucket(Bucket="scratch-ann")
    ben.put_object(Bucket="scratch-ann", Key="hush", Body=b"bens")
    assert [reads(token) for token in ("ann", "ben", "cas")] == [403, 200, 200], "made by another, it is another's"
    for call, more in ((ann.delete_bucket, {}), (ann.put_bucket_acl, {"ACL": "public-read"}), (ann.list_objects, {})):
        assert code_of(call, Bucket="scratch-ann", **more) == "AccessDenied", call
