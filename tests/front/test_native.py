"""The native API: each route, its errors, its description, and the speed of a listing's pages."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.core import limits
from forebay.core.access import Grant, Identity, encode_identities
from forebay.core.derived import KeepAnswer
from forebay.core.errors import NotFound
from forebay.core.formats.listing import ListingState
from forebay.core.formats.manifest import FORMAT, Manifest, Warm, WarmObjects
from forebay.core.machines.hints import HintsCall, HintsState
from forebay.core.messages import calls
from forebay.core.messages.batch import BatchCall, Item
from forebay.core.messages.calls import CachedPage
from forebay.core.messages.native import ChosenPart, Completion
from forebay.core.messages.node_state import ClusterNode, MapNode, NodeMap, NodeState
from forebay.core.metrics import METRICS, Snapshot
from forebay.core.types import Bucket, ListEntry, ListPage
from forebay.node.front.native.routes import ROUTES, find
from tests.front.fake_engine import Cold, Node

AN_EMPTY_TAR = bytes(1024)
JOB = calls.JobState("j1", "evict", "b", identity="reader")
UPLOAD = calls.UploadState("b", "k", "u1", 1.0)
PART = calls.PartState(1, 3, "e", 1.0)
COMPLETED = calls.UploadCompleted(calls.Written("e-1", "v", 3, 1.0))
HINTS = HintsState("j1", "b", "", "of all", 0, 1, 0)
MANIFEST = Manifest(FORMAT, "training", "1", 0.0, [], [Bucket("b", "memory://")], {}, [Warm("b", "k", 1, 2)])
ANSWERS: dict[str, Any] = {
    "bucket_put": lambda call: call.bucket,
    "bucket_delete": calls.Nothing(),
    "bucket_check": calls.Nothing(),
    "stat": calls.ObjectState("b", "k", 1, "v", "e", 0.0, 1, False, False, 0.0),
    "copy": calls.Written("e", "v", 1, 0.0),
    "keep": KeepAnswer(True),
    "listing": ListingState("b", "", "of all", 0, 4),
    "listing_part": b"four",
    "hints": HINTS,
    "hints_at": HINTS,
    "hints_state": HINTS,
    "hints_close": calls.Nothing(),
    "upload_create": UPLOAD,
    "uploads": calls.Uploads([UPLOAD], False),
    "upload_parts": calls.UploadParts(UPLOAD, [PART], False),
    "upload_part": PART,
    "upload_complete": COMPLETED,
    "upload_abort": calls.Nothing(),
    "job": JOB,
    "jobs": [JOB],
    "job_cancel": JOB,
    "status": NodeState("n1", "0", 1, 0.0),
    "lost": [],
    "lost_give_up": [],
    "volume_add": calls.VolumeState("", "/disk", "new"),
    "volume_give_up": calls.VolumeState("v1", "/disk", "missing"),
    "map": NodeMap(1, [MapNode("n1", "http://x")]),
    "wish": ClusterNode("n1", "http://x", "draining", "draining", 0.5, 1, "gives its keys away"),
    "metrics": Snapshot({"forebay_connections_open": 3.0}),
    "warm": WarmObjects([Warm("b", "k", 1, 2, ((0, 1),))]),
    **dict.fromkeys(("manifest", "manifest_put"), MANIFEST),
    "stop": calls.Nothing(),
    **dict.fromkeys(("prefetch", "refresh", "flush", "pin", "unpin", "evict", "rewarm"), JOB),
}


def ask(node: Node, target: str, method: str = "GET", body: Any = None, **headers: str) -> tuple[int, Any]:
    with node.connect() as client:
        answer = client.ask(target, method, b"" if body is None else msgspec.json.encode(body), **headers)
    assert answer.headers["content-type"] == "application/json"
    return answer.status, json.loads(answer.body) if answer.body else None


def body_for(route: Any) -> Any:
    if route.body is Bucket:
        return Bucket("strict", "memory://")
    if route.body is bytes:
        return "anything"
    if route.body is calls.LostCall:
        return calls.LostCall("b")
    if route.body is calls.VolumeNamed:
        return calls.VolumeNamed("v1")
    if route.body is calls.WishCall:
        return calls.WishCall("n1", "draining")
    if route.body is calls.ManifestCall:
        return calls.ManifestCall("b", "k", MANIFEST)
    if route.body is calls.CopyCall:
        return calls.CopyCall("b", "k", "b", "k")
    if route.body is Completion:
        return Completion([ChosenPart(1, "e")])
    if route.body is BatchCall:
        return BatchCall([Item("b", "k")])
    if route.body is HintsCall:
        return HintsCall("j1", "b", "", "of all", 0, bytes(12))
    return calls.JobCall("b", "p/") if route.body is not None else None


def target_for(route: Any) -> str:
    bucket = "strict" if route.body is Bucket else "b"  # the other's name is too short to be made anew
    queries = {
        "member_append": "?name=member",
        "hints_at": "?position=3",
        "upload_part": "?upload_id=u1&number=1",
        **dict.fromkeys(("upload_parts", "upload_complete", "upload_abort"), "?upload_id=u1"),
    }
    path: str = route.path + queries.get(route.name, "")
    return path.replace("{bucket}", bucket).replace("{key}", "k").replace("{job}", "j1")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method}-{route.name}")
def test_every_route_answers_as_described(node: Node, route: Any) -> None:
    node.engine.answers.update(ANSWERS)
    node.put("k", AN_EMPTY_TAR)
    target = target_for(route)
    with node.connect() as client:
        body = body_for(route)
        answer = client.ask(target, route.method, b"" if body is None else msgspec.json.encode(body))
    if route.name == "member_append":
        assert answer.status == 501, "`b` is written through"
        return
    assert answer.status == (202 if route.body is calls.JobCall else 200)
    if route.media == "application/json" and isinstance(route.answer, type):
        msgspec.json.decode(answer.body, type=route.answer)


def test_an_upload_says_to_the_engine_what_the_client_asked(node: Node) -> None:
    node.engine.answers.update(ANSWERS)
    meta = {"Content-Type": "text/x", "x-amz-meta-a": "b", "x-amz-tagging": "c=d"}
    status, said = ask(node, "/-/v1/uploads/b/a/k%20%2B", "POST", **meta)
    assert (status, said["upload_id"]) == (200, "u1")
    ask(node, "/-/v1/uploads/b?prefix=a%2F&after_key=a/k&after_id=u0&limit=7")
    ask(node, "/-/v1/uploads/b/a/k?upload_id=u1&after=3&limit=1")
    with node.connect() as client:
        body = b"part"
        sha = base64.b64encode(hashlib.sha256(body).digest()).decode()
        answer = client.ask("/-/v1/parts/b/a/k?upload_id=u1&number=4", "PUT", body, **{"x-amz-checksum-sha256": sha})
        assert (answer.status, json.loads(answer.body)["etag"]) == (200, "e")
        assert client.ask("/-/v1/parts/b/a/k?upload_id=u1&number=5", "PUT", **{"Content-Length": "0"}).status == 200
    parts = [[1], [2, '"e2"'], [4, "e4", {"SHA256": "x"}]]
    answered = ask(
        node, "/-/v1/complete/b/a/k?upload_id=u1", "POST", {"parts": parts, "size_bytes": 9}, **{"If-None-Match": "*"}
    )
    assert answered == (200, msgspec.to_builtins(COMPLETED))
    assert ask(node, "/-/v1/uploads/b/a/k?upload_id=u1", "DELETE") == (200, {})
    at, md5 = ("b", "a/k", "u1"), hashlib.md5(body).hexdigest()
    stored = (("content-type", "text/x"), ("x-amz-meta-a", "b"))
    assert node.engine.calls == [
        ("upload_create", calls.UploadCreateCall("b", "a/k +", stored, tags="c=d")),
        ("uploads", calls.UploadsCall("b", "a/", "a/k", "u0", 7)),
        ("upload_parts", calls.UploadPartsCall(*at, 3, 1)),
        ("upload_part", calls.UploadPartCall(*at, 4, 4, md5, "", body, {"SHA256": sha})),
        ("upload_part", calls.UploadPartCall(*at, 5, 0, hashlib.md5().hexdigest(), "", b"")),
        (
            "upload_complete",
            calls.UploadCompleteCall(
                *at, [(1, "", {}), (2, '"e2"', {}), (4, "e4", {"SHA256": "x"})], if_none_match="*", size_bytes=9
            ),
        ),
        ("upload_abort", calls.UploadNamed(*at)),
    ]


@pytest.mark.parametrize(
    ("target", "method", "body", "code"),
    [
        ("parts/b/k?upload_id=u1", "PUT", None, "InvalidArgument"),
        ("parts/b/k?upload_id=u1&number=0", "PUT", None, "InvalidArgument"),
        ("parts/b/k?upload_id=u1&number=10001", "PUT", None, "InvalidArgument"),
        ("parts/b/k?number=1", "PUT", None, "NoSuchUpload"),
        ("uploads/b/k?upload_id=u1&limit=0", "GET", None, ""),
        ("uploads/b/k?upload_id=u1&after=x", "GET", None, ""),
        ("uploads/b?limit=0000000001", "GET", None, ""),
        ("list/b?limit=0000000001001", "GET", None, ""),
        ("complete/b/k?upload_id=u1", "POST", {"parts": [[0, "e"]]}, ""),
        ("complete/b/k?upload_id=u1", "POST", {"parts": [[1 << 70]]}, ""),
        ("complete/b/k?upload_id=u1", "POST", {"parts": [[]]}, ""),
        ("complete/b/k?upload_id=u1", "POST", {"parts": [[1]], "size_bytes": -1}, ""),
        ("complete/b/k?upload_id=u1", "POST", {}, ""),
        ("complete/b/k?upload_id=u1", "POST", None, ""),
        ("uploads/b/k", "POST", {"a": 1}, "EntityTooLarge"),
    ],
)
def test_a_request_that_makes_no_sense(node: Node, target: str, method: str, body: Any, code: str) -> None:
    status, said = ask(node, f"/-/v1/{target}", method, body)
    kind = "NotFound" if code == "NoSuchUpload" else "Invalid"
    assert (400 <= status < 500, said["error"]["kind"], said["error"]["code"]) == (True, kind, code)
    assert not node.engine.calls


def test_a_completion_that_takes_long_is_asked_for_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.node.front.native.uploads.COMPLETE_WAIT_S", 0.01)
    node.engine.mute.add("upload_complete")
    target, body = "/-/v1/complete/b/k?upload_id=u1", {"parts": [[1, "e"]]}
    assert ask(node, target, "POST", body) == (202, {})
    monkeypatch.setattr("forebay.node.front.native.uploads.COMPLETE_WAIT_S", 60.0)
    node.engine.mute.clear()
    node.engine.answers["upload_complete"] = COMPLETED
    assert ask(node, target, "POST", body) == (200, msgspec.to_builtins(COMPLETED))


def test_a_completion_of_as_many_parts_as_there_may_be(node: Node) -> None:
    node.engine.answers["upload_complete"] = COMPLETED
    parts = [[number, "0" * 32, {"SHA512": "x" * 88}] for number in range(1, limits.PARTS_MAX + 1)]
    assert ask(node, "/-/v1/complete/b/k?upload_id=u1", "POST", {"parts": parts})[0] == 200
    assert ask(node, "/-/v1/complete/b/k?upload_id=u1", "POST", {"parts": parts * 2})[0] == 413


def test_a_part_that_is_not_what_was_promised_is_not_taken(node: Node) -> None:
    def status(body: bytes, **headers: str) -> int:
        with node.connect() as client:
            return client.ask("/-/v1/parts/b/k?upload_id=u1&number=1", "PUT", body, **headers).status

    node.engine.answers["upload_part"] = NotFound("gone", code="NoSuchUpload")
    long = bytes(limits.INLINE_BYTES_MAX + 1)
    for body in (b"part", long):
        assert status(body, **{"x-amz-checksum-crc32": "AAAAAA=="}) == 400
    assert not node.engine.calls
    assert status(long) == 404
    assert not list((node.dir / "volumes" / "v0" / "tmp").iterdir()), "no file of a refused part stays"


def test_paths_and_methods_that_are_none(node: Node) -> None:
    for target in (
        "/-/",
        "/-/v1",
        "/-/v1/objects/b",
        "/-/v1/objects//k",
        "/-/v1/buckets/b/other",
        "/-/v2/map",
        "/-/v1/stat/b/",
    ):
        status, said = ask(node, target)
        assert (status, said["error"]["kind"], said["error"]["code"]) == (404, "NotFound", "NoSuchPath")
    status, said = ask(node, "/-/v1/map", "DELETE")
    assert (status, "use GET" in said["error"]["message"]) == (405, True)
    assert ask(node, "/-/v1/evict", "POST", {"prefix": 3})[0] == 400
    assert ask(node, "/-/v1/buckets/b", "DELETE", {"a": 1})[0] == 413
    assert ask(node, "/-/v1/stat/b/%zz")[0] == 400
    assert ask(node, "/-/v1/stat/b/" + "x" * 1025)[0] == 400


def test_a_key_keeps_its_slashes_and_escapes() -> None:
    route, taken = find("GET", b"/-/v1/stat/b/a//b/../%2F%C3%BC+%25")
    assert (route.name, taken) == ("stat", {"bucket": "b", "key": "a//b/..//ü+%"})


def test_calls_carry_what_was_asked(node: Node) -> None:
    node.engine.answers.update(ANSWERS)
    ask(node, "/-/v1/stat/b/a/b?revalidate=1")
    ask(node, "/-/v1/list/b?prefix=a%2Fb&delimiter=/&start_after=a+b&limit=7")
    ask(node, "/-/v1/evict", "POST", calls.JobCall("b", keys=["x", "y"], dry_run=True))
    ask(node, "/-/v1/jobs/j9", "DELETE")
    assert node.engine.calls == [
        ("stat", calls.StatCall("b", "a/b", True)),
        ("list", calls.ListCall("b", "a/b", "/", "a b", 7)),
        ("evict", calls.JobCall("b", keys=["x", "y"], dry_run=True)),
        ("job", calls.JobNamed("j9")),
        ("job_cancel", calls.JobNamed("j9")),
    ]
    assert ask(node, "/-/v1/evict", "POST", calls.JobCall("b", "p", ["x"]))[0] == 400
    assert ask(node, "/-/v1/list/b?limit=1001")[0] == 400
    assert ask(node, "/-/v1/list/b?limit=x")[0] == 400
    assert ask(node, "/-/v1/list/nowhere")[0] == 404


def test_engine_errors_keep_their_kind(node: Node) -> None:
    node.engine.answers["stat"] = NotFound("no such key: check the name", code="NoSuchKey")
    status, said = ask(node, "/-/v1/stat/b/k")
    assert (status, said["error"]["kind"], said["error"]["code"]) == (404, "NotFound", "NoSuchKey")


# --- listings ---------------------------------------------------------------------------------------------------------
def cached(node: Node, query: str) -> CachedPage:
    with node.connect() as client:
        return msgspec.json.decode(client.ask(f"/-/v1/list/b?cached=1&{query}").body, type=CachedPage)


def test_the_index_is_listed_in_pages_and_rolled_up(node: Node) -> None:
    keys = ["a", "dir/1", "dir/2", "dir/sub/3", "dir\U0010ffff", "dir/\U0010ffff", "e/1", "z", "é"]
    for key in keys:
        node.put(key, b"x" * 5)
    ordered = sorted(keys, key=str.encode)
    for limit in (1, 2, 3, 4, 1000):
        for prefix, delimiter in (("", ""), ("", "/"), ("dir", "/"), ("dir/", "/"), ("none", "/"), ("", "ir")):
            seen_keys: list[str] = []
            seen_prefixes: list[str] = []
            after = ""
            for _ in range(50):
                query = f"prefix={prefix}&delimiter={delimiter}&limit={limit}&start_after={_quote(after)}"
                page = cached(node, query)
                assert len(page.entries) + len(page.prefixes) <= limit
                seen_keys += [entry.key for entry in page.entries]
                seen_prefixes += page.prefixes
                after = page.next_after
                if not after:
                    break
            rest = {key: key[len(prefix) :] for key in ordered if key.startswith(prefix)}
            rolled = {
                key: prefix + tail[: tail.index(delimiter) + len(delimiter)]
                for key, tail in rest.items()
                if delimiter and delimiter in tail
            }
            assert seen_keys == [key for key in rest if key not in rolled]
            assert list(dict.fromkeys(seen_prefixes)) == list(dict.fromkeys(rolled.values()))
    assert not node.engine.calls


def _quote(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


def test_cached_bytes_of_a_partial_object(node: Node) -> None:
    block = 4 * 1024 * 1024
    node.put("part", bytes(2 * block + 10), blocks={0, 2})
    node.put("whole", bytes(100_000))
    page = cached(node, "")
    assert [(entry.key, entry.cached_bytes) for entry in page.entries] == [("part", block + 10), ("whole", 100_000)]


def test_everything_that_is_cached_streams_as_lines(node: Node) -> None:
    for number in range(2500):
        node.store.put_inline("b", _info(f"p/{number:05}"), b"x", checked_s=1.0)
    node.store.flush()
    answer = node.get("/-/v1/list/b?format=ndjson&prefix=p/&start_after=p/00099")
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert answer.headers["transfer-encoding"] == "chunked"
    assert [line["key"] for line in lines] == [f"p/{number:05}" for number in range(100, 2500)]
    assert set(lines[0]) == {"key", "size_bytes", "etag", "modified_s"}


def _info(key: str) -> Any:
    from tests.front.fake_engine import info

    return info(key, 1)


def test_the_backends_listing_comes_from_the_engine(node: Node) -> None:
    node.engine.answers["list"] = ListPage([ListEntry("k", 1, "e", 2.0)], ["p/"], "more")
    _, said = ask(node, "/-/v1/list/b")
    assert said == [[["k", 1, "e", 2.0]], ["p/"], "more"]


# --- buckets ----------------------------------------------------------------------------------------------------------
def test_a_bucket_is_changed_by_the_engine_which_checks_first_if_that_was_asked(node: Node) -> None:
    node.engine.answers.update(ANSWERS)
    new = {"name": "new", "url": "s3://x", "options": {"sas_token": "***"}}
    assert ask(node, "/-/v1/buckets/new", "PUT", new)[1]["options"] == new["options"]
    assert ask(node, "/-/v1/buckets/new?check=1", "PUT", new)[0] == 200
    assert ask(node, "/-/v1/buckets/other", "PUT", {"name": "b", "url": "s3://x"})[0] == 400
    assert [(verb, call.check) for verb, call in node.engine.calls] == [("bucket_put", False), ("bucket_put", True)]


# --- who may ----------------------------------------------------------------------------------------------------------
def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def test_tokens_and_grants_hold(node: Node) -> None:
    reader = Identity("reader", token_sha256=_hash("read-token"), grants=(Grant("read", "b"),))
    admin = Identity("admin", token_sha256=_hash("admin-token"), grants=(Grant("admin", "*"),))
    node.engine.answers.update(ANSWERS)
    node.put("k", AN_EMPTY_TAR)
    node.engine.identities = encode_identities([reader, admin])
    node.run(node.engine.stop())
    node.run(node.engine.start())
    node.run(node.front.link.wait(90))
    for route in ROUTES:
        target = target_for(route)
        statuses = []
        for token in (None, "wrong", "read-token", "admin-token"):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            with node.connect() as client:
                body = body_for(route)
                sent = b"" if body is None else msgspec.json.encode(body)
                statuses.append(client.ask(target, route.method, sent, **headers).status // 100)
        expected = [2, 2] if route.may is None else [4, 4]
        allowed = 5 if route.name == "member_append" else 2  # `b` is written through
        assert statuses == [*expected, 4 if route.may in ("write", "admin") else 2, allowed], route
    headers = {"Authorization": "Bearer read-token"}
    assert ask(node, "/-/v1/list/strict", **headers)[0] == 403
    assert ask(node, "/-/v1/prefetch", "POST", calls.JobCall("strict"), **headers)[0] == 403
    assert [bucket["name"] for bucket in ask(node, "/-/v1/buckets", **headers)[1]] == ["b"]


def test_a_copy_takes_the_right_to_read_its_source_and_says_where_it_goes_once(node: Node) -> None:
    writer = Identity("writer", token_sha256=_hash("w"), grants=(Grant("write", "b"), Grant("read", "b")))
    node.engine.answers.update(ANSWERS)
    node.engine.identities = encode_identities([writer])
    node.run(node.engine.stop())
    node.run(node.engine.start())
    node.run(node.front.link.wait(90))
    token = {"Authorization": "Bearer w"}

    def status(source: str, to: str = "b") -> int:
        return ask(node, "/-/v1/copy/b/k", "POST", calls.CopyCall(source, "a", to, "k"), **token)[0]

    assert [status("b"), status("strict"), status("b", "strict")] == [200, 403, 400]
    assert [call for verb, call in node.engine.calls if verb == "copy"] == [calls.CopyCall("b", "a", "b", "k")]


def test_a_page_of_another_site_gets_nothing_by_pointing_its_name_here(node: Node) -> None:
    """DNS rebinding: the browser believes that the node is the page's own server, and says so in Host."""
    node.engine.answers.update(ANSWERS)
    node.put("k", b"data")

    def status(host: str, target: str) -> int:
        with node.connect() as client:
            client.send(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            return client.answer().status

    mine = ("localhost:9400", "127.0.0.1", "127.9.9.9:80", "[::1]:9400", "LocalHost.", "forebay.localhost")
    others = ("evil.example:9400", "10.0.0.1", "localhost.evil.example", "127.0.0.1.evil.example", "[2001:db8::1]:9400")
    for target in ("/-/v1/status", "/-/v1/objects/b/k", "/-/v1/list/b"):
        assert {status(host, target) for host in mine} == {200}, target
        assert {status(host, target) for host in others} == {403}, target
    assert status("evil.example", "/-/healthz") == 200  # says nothing about anybody's data


def test_a_page_of_another_site_changes_nothing_by_sending_requests_here(node: Node) -> None:
    node.engine.answers.update(ANSWERS)
    for origin, status in (
        ("https://evil.example", 403),
        ("null", 403),
        ("https://127.0.0.1.evil.example", 403),
        ("http://localhost:3000", 403),  # another address: whoever listens there may show others' pages
        ("http://b.localhost", 403),  # there, a page is an object of a bucket
        ("https://localhost", 202),
        ("http://localhost", 202),
    ):
        assert ask(node, "/-/v1/evict", "POST", calls.JobCall("b"), Origin=origin)[0] == status, origin
    for said, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 202), ("none", 202)):
        assert ask(node, "/-/v1/evict", "POST", calls.JobCall("b"), Sec_Fetch_Site=said)[0] == status, said
    with node.connect() as client:  # the page is an object of the bucket whose name was asked
        body = b'{"bucket": "b"}'
        client.send(
            b"POST /-/v1/evict HTTP/1.1\r\nHost: b.localhost\r\nOrigin: http://b.localhost\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        assert client.answer().status == 403
    assert ask(node, "/-/v1/status", Origin="https://evil.example")[0] == 200, "it cannot read the answer"


# --- descriptions -----------------------------------------------------------------------------------------------------
def test_the_description_names_every_route_and_resolves(node: Node) -> None:
    document = ask(node, "/-/openapi.json")[1]
    described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert described == {(route.method, route.path) for route in ROUTES}
    assert document["openapi"].startswith("3.1")
    ids = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids))
    schemas = document["components"]["schemas"]
    for reference in re.findall(r'"\$ref": ?"([^"]+)"', json.dumps(document)):
        assert reference.removeprefix("#/components/schemas/") in schemas
    for path, item in document["paths"].items():
        for operation in item.values():
            named = {at["name"] for at in operation["parameters"] if at["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path))
            assert {"default"} < set(operation["responses"])


def test_the_protocol_document_names_every_route() -> None:
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    for route in ROUTES:
        assert f"`{route.method} {route.path}" in text, f"docs/protocol.md does not name {route.method} {route.path}"


def test_metrics_are_what_prometheus_reads(node: Node) -> None:
    node.put("o", b"x")
    node.get("/b/o")
    node.engine.answers["metrics"] = lambda _: node.front.snapshot()
    text = node.get("/-/metrics").body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for family in families.values():
        metric = METRICS.get(family.name) or METRICS[family.name + "_total"]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
    (hits,) = [s for s in families["forebay_reads"].samples if s.labels == {"result": "hit"}]
    assert hits.value == 1
    buckets = [s for s in families["forebay_hit_seconds"].samples if s.name.endswith("_bucket")]
    assert [s.value for s in buckets] == sorted(s.value for s in buckets)
    assert (buckets[-1].labels["le"], buckets[-1].value) == ("+Inf", 1)


def test_openapi_bodies_are_checked_like_the_engine_would(node: Node) -> None:
    node.engine.cold["b", "k"] = Cold(b"x", whole=True)
    status, said = ask(node, "/-/v1/prefetch", "POST", {"bucket": "b", "keys": ["k" * 1025]})
    assert (status, said["error"]["code"]) == (400, "KeyTooLongError")
