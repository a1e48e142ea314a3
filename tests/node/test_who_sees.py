"""Who may send a real node where, and what its identities see of each other."""

from __future__ import annotations

import base64
import json
import struct
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from forebay.client.sync import Client

from .conftest import NodeProcess

Make = Callable[..., NodeProcess]


class Listener(ThreadingHTTPServer):
    """Notes what it is asked, and answers 404, or what `says` has for a path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.says: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Listener

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        status, headers, body = self.server.says.get(self.path, (404, {}, b""))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_PUT = do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def listener() -> Iterator[Callable[[], Listener]]:
    """`listener()` is a web server that notes what it is asked."""
    made: list[Listener] = []

    def make() -> Listener:
        made.append(Listener())
        threading.Thread(target=made[-1].serve_forever, daemon=True).start()
        return made[-1]

    yield make
    for one in made:
        one.shutdown()
        one.server_close()


def put(node: NodeProcess, name: str, url: str, token: str = "", query: str = "", **more: Any) -> tuple[int, str]:
    """Add or change a bucket: status and answer."""
    body = json.dumps({"name": name, "url": url, **more}).encode()
    status, said = node.ask("PUT", f"/-/v1/buckets/{name}{query}", _bearer(token), body)
    return status, said.decode()


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def test_a_hidden_secret_does_not_follow_to_another_place(node: Make, listener: Callable[[], Listener]) -> None:
    ours, theirs = listener(), listener()
    one = node("--fronts", "1")
    options = {"account_name": "acc", "endpoint": f"{ours.url}/acc", "sas_token": "sig=s3cr3t"}
    assert put(one, "lake", "az://lake", options=options)[0] == 200
    shown = one.json("GET", "buckets/lake")
    assert shown["options"] == {**options, "sas_token": "***"}
    moves: list[dict[str, str]] = [
        {"endpoint": f"{theirs.url}/acc"}, {"account_name": "other"}, {"proxy_url": theirs.url},
        {"allow_invalid_certificates": "true"},
    ]  # fmt: skip
    for moved in moves:
        for query in ("", "?check=1"):
            status, said = put(one, "lake", "az://lake", query=query, options={**shown["options"], **moved})
            assert (status, "sas_token" in said) == (400, True), (moved, said)
    assert put(one, "lake", "az://another", options=shown["options"])[0] == 400
    assert put(one, "lake", "az://lake", options=shown["options"], freshness_s=5.0)[0] == 200, "nothing moved"
    assert not theirs.asked, "nobody else was asked, with the secret or without"
    assert put(one, "lake", "az://lake", query="?check=1", options={**options, "endpoint": theirs.url})[0] == 404
    assert one.json("GET", "buckets/lake")["options"]["endpoint"] == options["endpoint"], "the check came first"
    one.ask("GET", "/-/v1/buckets/lake/check")
    assert any("s3cr3t" in path for path in ours.asked), "and the secret of before is in use"


# --- where a bucket may send the node --------------------------------------------------------------------------------
def identities(path: Path, **allow: str) -> list[str]:
    """Flags for a node with these identities, each with its name as its token."""
    entries = [{"name": name, "token": name, "allow": grants} for name, grants in allow.items()]
    path.write_text(json.dumps({"identities": entries}))
    path.chmod(0o600)
    return ["--identities", str(path), "--fronts", "1"]


def get(node: NodeProcess, target: str, token: str) -> tuple[int, str]:
    status, body = node.ask("GET", f"/-/v1/{target}", _bearer(token))
    return status, body.decode(errors="replace")


def test_an_admin_of_some_buckets_is_not_root_of_the_node(
    node: Make, listener: Callable[[], Listener], tmp_path: Path
) -> None:
    inner = listener()
    file = tmp_path / "identities.json"
    (tmp_path / "data").mkdir()
    one = node(
        *identities(file, root="admin:*", lead="admin:team-*"),
        environment={"AWS_ACCESS_KEY_ID": "nodes", "AWS_SECRET_ACCESS_KEY": "own", "AWS_ENDPOINT_URL": inner.url},
    )
    wanted: list[tuple[str, dict[str, str]]] = [
        (f"file://{one.dir}/node", {}), (f"file://{tmp_path}", {}), (inner.url, {}), ("s3://payroll", {}),
        ("s3://payroll", {"endpoint": inner.url}), ("memory://root", {}), ("https://169.254.169.254/latest", {}),
    ]  # fmt: skip
    for url, options in wanted:
        for query in ("", "?check=1"):
            status, said = put(one, "team-a", url, "lead", query, options=options)
            assert (status, "allow" in said) == (403, True), (url, said)
    assert not inner.asked, "what is not allowed is not even probed"
    assert get(one, "buckets/team-a", "lead")[0] == 404
    assert put(one, "team-a", "local://", "lead", write="local")[0] == 200, "without a backend it is theirs to make"
    assert put(one, "team-b", f"file://{tmp_path}/data", "root")[0] == 200, "who holds admin:* decides"
    assert put(one, "team-b", f"file://{tmp_path}/data", "lead", freshness_s=1.0)[0] == 200, "and the place stays"
    assert put(one, "team-b", f"file://{tmp_path}", "lead")[0] == 403
    assert put(one, "team-b", f"file://{tmp_path}/data", "lead", held=False, options={"region": "x"})[0] in (400, 403)
    assert put(one, "loop", inner.url, "root")[0] == 200, "loopback as well"


def test_no_directory_bucket_reaches_what_is_the_nodes_own(node: Make, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "ours").write_text("ours")
    volume, file = tmp_path / "disk", tmp_path / "identities.json"
    one = node(*identities(file, root="admin:*"), "--volume", str(volume))
    (data / "there").symlink_to(one.dir)
    (data / "names").symlink_to(file)
    (data / "linked").hardlink_to(file)
    for path in (f"{one.dir}/node", f"{one.dir}/node/run", volume, f"{data}/there/node"):
        assert put(one, "inside", f"file://{path}", "root", "?check=1")[0] == 403, path
    assert put(one, "data", f"file://{data}", "root", "?check=1", freshness_s=0)[0] == 200
    (data / "late").symlink_to(volume)  # after it was added
    assert get(one, "objects/data/ours", "root") == (200, "ours")
    meta = next(path.name for path in Path(one.dir, "node").iterdir() if path.name.startswith("meta"))
    for key in ("names", "linked", f"there/node/{meta}", "late/volume.json", "late/x"):
        assert get(one, f"objects/data/{key}", "root")[0] == 403, key
        assert get(one, f"stat/data/{key}", "root")[0] == 403, key
    for key in ("there/node/new", "late/new", f"there/node/{meta}"):
        for method in ("PUT", "DELETE"):
            body = b"x" if method == "PUT" else None
            assert one.ask(method, f"/-/v1/objects/data/{key}", _bearer("root"), body)[0] == 403, (method, key)
    assert file.read_text().startswith("{")
    assert Path(one.dir, "node", meta).stat().st_size
    listed = json.loads(get(one, "list/data", "root")[1])
    assert [entry[0] for entry in listed[0]] == ["ours", "there/stderr.log"], "nor are they listed"
    assert get(one, "list/data?prefix=there/node/", "root") == (200, '[[],[],""]')


def test_within_the_list_teams_set_their_own_backends(
    node: Make, listener: Callable[[], Listener], tmp_path: Path
) -> None:
    for name in ("team-a", "team-b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "k").write_text(name)
    web, inner = listener(), listener()
    inner.says["/k"] = web.says["/k"] = (200, {"ETag": '"1"'}, b"web")
    web.says["/away"] = (302, {"Location": f"{inner.url}/k"}, b"")
    flags = identities(tmp_path / "identities.json", root="admin:*", lead="admin:team-*")
    allowed = [
        f"file://{tmp_path}/data/{{bucket}}", f"http://127.0.0.1:{web.server_port}", "http://*:*", "s3://team-*",
    ]  # fmt: skip
    more = [flag for pattern in allowed for flag in ("--allow-backend", pattern)]
    place = tmp_path / "one"
    one = node(*flags, *more, dir=place)
    assert put(one, "team-a", f"file://{tmp_path}/data/team-a", "lead", "?check=1", freshness_s=0)[0] == 200
    assert put(one, "team-a", f"file://{tmp_path}/data/team-b", "lead")[0] == 403
    assert get(one, "objects/team-a/k", "lead") == (200, "team-a")
    (tmp_path / "data" / "team-a" / "other").symlink_to(tmp_path / "data" / "team-b")
    assert get(one, "objects/team-a/other/k", "lead")[0] == 403, "a link made later leads nowhere"

    assert put(one, "team-web", web.url, "lead")[0] == 200
    assert get(one, "objects/team-web/k", "lead") == (200, "web")
    assert get(one, "objects/team-web/away", "lead")[0] >= 400, "what is allowed does not lead on to what is not"
    port = inner.server_port
    for host in ("127.0.0.1", "2130706433", "localhost", "0.0.0.0", "[::ffff:7f00:1]"):
        assert put(one, "team-in", f"http://{host}:{port}", "lead")[0] == 200, "the list has http://*:*"
        assert get(one, "objects/team-in/k", "lead")[0] == 403, host
    assert not inner.asked, "whatever an address is called"

    assert put(one, "team-s3", "s3://team-s3", "lead")[0] == 400, "credentials come with the bucket"
    one.stop()
    again = node(*flags, dir=place)
    for bucket in ("team-a", "team-web"):
        status, said = get(again, f"list/{bucket}", "lead")
        assert (status, "--allow-backend" in said) == (403, True), "a list that shrank holds for what is there"
    assert get(again, "status", "root")[0] == 200
    assert again.ask("DELETE", "/-/v1/buckets/team-web", _bearer("lead"))[0] == 200
    kept = {"freshness_s": 5.0, "held": True}
    assert put(again, "team-a", f"file://{tmp_path}/data/team-a", "root", **kept)[0] == 403
    assert put(again, "team-a", f"file://{tmp_path}/data/team-a", "lead", freshness_s=5.0)[0] == 403
    assert put(again, "team-a", f"file://{tmp_path}/data/team-a", "root", freshness_s=0)[0] == 200, "who may took it on"
    assert get(again, "objects/team-a/other/k", "lead") == (200, "team-b")


# --- what identities see of each other -------------------------------------------------------------------------------
def test_nobody_sees_what_is_not_theirs(node: Make, tmp_path: Path) -> None:
    for name in ("team-a", "team-b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
    flags = identities(
        tmp_path / "identities.json",
        root="admin:*", a="read:team-a,write:team-a", b="read:team-b", lead="admin:team-b", prometheus="observe:*",
        part="observe:team-a", writer="write:team-b",
    )  # fmt: skip
    one = node(*flags, dir=tmp_path / "one")
    for name in ("team-a", "team-b"):
        assert put(one, name, f"file://{tmp_path}/{name}", "root")[0] == 200
        assert get(one, f"objects/{name}/{name}.txt", "root") == (200, name)
    metrics, jobs = "/-/metrics", "/-/v1/jobs"

    def said(token: str, target: str) -> str:
        status, body = one.ask("GET", target, _bearer(token))
        assert status == 200, (token, target, body)
        return body.decode()

    def job(token: str, bucket: str, method: str = "prefetch") -> str:
        body = json.dumps({"bucket": bucket, "prefix": f"{bucket}.t", "identity": "root"}).encode()
        status, answer = one.ask("POST", f"/-/v1/{method}", _bearer(token), body)
        assert status == 202, answer
        state = json.loads(answer)
        assert state["identity"] == token, "nobody begins a job in another's name"
        return str(state["job"])

    began = {"a": job("a", "team-a"), "b": job("b", "team-b"), "root": job("root", "team-b", "evict")}
    everywhere = ("/-/v1/buckets", "/-/v1/status", metrics, jobs)
    for token, mine, other in (("a", "team-a", "team-b"), ("b", "team-b", "team-a"), ("part", "team-a", "team-b"),
                               ("lead", "team-b", "team-a"), ("writer", "team-b", "team-a")):  # fmt: skip
        for target in everywhere:
            assert other not in said(token, target), (token, target)
        assert mine in said(token, "/-/v1/buckets"), token
        assert f'bucket="{mine}"' in said(token, metrics), token
        assert "forebay_process_cpu_seconds_total" not in said(token, metrics), token
        assert str(tmp_path / "one") not in said(token, "/-/v1/status"), "nor where the node's disks are"
    assert one.ask("GET", metrics)[0] in (401, 403)
    for token in ("prometheus", "root"):
        assert all(text in said(token, metrics) for text in ("team-a", "team-b", "forebay_process_cpu_seconds_total"))
        assert all(text in said(token, "/-/v1/status") for text in ("team-a", "team-b", str(tmp_path / "one")))
    assert json.loads(said("prometheus", jobs)) == []
    for target in (
        "objects/team-a/team-a.txt",
        "list/team-a",
        "stat/team-a/team-a.txt",
        "buckets/team-a",
        "lost/team-a",
    ):
        assert get(one, target, "prometheus")[0] == 403, "it sees, and takes nothing"

    def seen(token: str) -> set[str]:
        return {str(state["job"]) for state in json.loads(said(token, jobs))}

    assert [seen(token) for token in ("a", "b", "lead", "root")] == [
        {began["a"]}, {began["b"]}, {began["b"], began["root"]}, set(began.values()),
    ]  # fmt: skip
    for method in ("GET", "DELETE"):
        for token, whose in (("a", "b"), ("b", "root"), ("lead", "a"), ("prometheus", "a"), ("part", "a")):
            status, body = one.ask(method, f"/-/v1/jobs/{began[whose]}", _bearer(token))
            unknown = one.ask(method, "/-/v1/jobs/00000000", _bearer(token))
            assert (status, body.replace(began[whose].encode(), b"00000000")) == unknown, "as one that is not there"
        for token, whose in (("a", "a"), ("lead", "b"), ("root", "a")):
            assert one.ask(method, f"/-/v1/jobs/{began[whose]}", _bearer(token))[0] == 200, (method, token)


def test_hints_are_their_identitys(node: Make, tmp_path: Path) -> None:
    for name in ("team-a", "team-b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "k").write_text(name)
    flags = identities(tmp_path / "identities.json", root="admin:*", a="read:team-a", b="read:team-b")
    one = node(*flags)
    listings = {}
    for name, token in (("team-a", "a"), ("team-b", "b")):
        assert put(one, name, f"file://{tmp_path}/{name}", "root")[0] == 200
        with Client(one.endpoint, token=token) as client:
            listings[token] = client.listing(name).id
    told = {
        token: {"job": "train", "bucket": f"team-{token}", "prefix": "", "listing": listings[token], "start": 0,
                "accesses": base64.b64encode(struct.pack("III", 0, 0, 1)).decode(), "identity": other}
        for token, other in (("a", "b"), ("b", "a"))
    }  # fmt: skip

    def ask(token: str, method: str = "GET", query: str = "", job: str = "train") -> tuple[int, Any]:
        body = json.dumps({**told[token], "job": job}).encode() if method == "POST" else None
        status, answer = one.ask(method, f"/-/v1/hints/{quote(job, safe='')}{query}", _bearer(token), body)
        return status, json.loads(answer)

    assert ask("b", "POST")[0] == 200
    assert ask("a")[0] == 404, "the name of another's job is no job"
    assert ask("a", "PUT", "?position=1")[0] == 404
    assert ask("a", "POST")[1]["bucket"] == "team-a", "and may be one's own"
    assert ask("a", "PUT", "?position=1")[1]["position"] == 1
    state = ask("b")[1]
    assert (state["job"], state["bucket"], state["position"]) == ("train", "team-b", 0), "as it was"
    assert ask("a", "DELETE")[0] == 200
    assert ask("b")[0] == 200
    for job in ("b/train", "../b/train"):
        assert ask("a", job=job)[0] == 400, job
