"""A disk that takes no writes: what is on others goes on, what needs it is refused in bounded time, nothing is lost."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.disks import Disk, disk
from tests.patience import PATIENCE_S

from .conftest import MIB, NodeProcess, pattern, until

__all__ = ["disk"]
Make = Callable[..., NodeProcess]
pytestmark = pytest.mark.real

SMALL, MIDDLE, LARGE = 3_000, 100_000, 3 * MIB
MADE = ("copy", "shard.tar", "part")
SIZES = {"small": SMALL, "middle": MIDDLE, "large": LARGE}


def volumes(one: NodeProcess) -> dict[str, dict[str, Any]]:
    """By path."""
    return {each["path"]: each for each in one.json("GET", "status")["volumes"]}


def where(one: NodeProcess, bucket: str, key: str) -> str:
    """The path of the volume that has the object."""
    found = one.json("GET", f"stat/{bucket}/{key}")["volume"]
    return next(path for path, each in volumes(one).items() if each["volume_id"] == found)


def answers(
    one: NodeProcess, method: str, target: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """As `ask`, and more patient: a stall is seen later where the machine is busy."""
    url = urlsplit(one.endpoint)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=PATIENCE_S)
    try:
        connection.request(method, target, body=body, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    except TimeoutError:
        raise AssertionError(f"{method} {target} was not answered: {one.log[-2000:]}") from None
    finally:
        connection.close()


@pytest.fixture
def two(node: Make, disk: Callable[[str], Disk], tmp_path: Path) -> tuple[NodeProcess, Disk, Disk]:
    """A node of one front with two disks, and a bucket of each mode."""
    a, b = disk("a"), disk("b")
    one = node("--fronts", "1", "--flush-timeout", "0", "--volume", str(a.path / "v"), "--volume", str(b.path / "v"))
    (tmp_path / "bucket").mkdir()
    for name, write in (("through", "through"), ("back", "back"), ("here", "local")):
        url = "local://" if write == "local" else f"file://{tmp_path / 'bucket' / name}"
        (tmp_path / "bucket" / name).mkdir()
        one.json("PUT", f"buckets/{name}", {"name": name, "url": url, "freshness_s": 1e18, "write": write})
    return one, a, b


def test_a_frozen_disk_stops_nothing_that_does_not_need_it(two: tuple[NodeProcess, Disk, Disk], tmp_path: Path) -> None:
    one, a, b = two
    source = tmp_path / "bucket" / "through"
    for number in range(24):
        (source / f"warm-{number}").write_bytes(pattern(MIDDLE, number))
        (source / f"cold-{number}").write_bytes(pattern(MIDDLE, number + 100))
        assert one.get("through", f"warm-{number}") == pattern(MIDDLE, number)
    kept: dict[str, bytes] = {}
    for bucket in ("here", "back"):
        for name, size in SIZES.items():
            for number in range(8):
                kept[f"{bucket}/{name}-{number}"] = data = pattern(size, number)
                assert answers(one, "PUT", f"/{bucket}/{name}-{number}", data)[0] == 200
    at = {f"warm-{number}": where(one, "through", f"warm-{number}") for number in range(24)}
    assert len(set(at.values())) == 2
    frozen, healthy = str(a.path / "v"), str(b.path / "v")
    written: dict[str, tuple[int, bytes]] = {}
    with ThreadPoolExecutor(32) as clients:
        with a.frozen():
            sent: dict[str, Future[tuple[int, bytes]]] = {}
            for bucket in ("through", "back", "here"):
                for name, size in SIZES.items():
                    for number in range(4):
                        key = f"{bucket}/new-{name}-{number}"
                        sent[key] = clients.submit(answers, one, "PUT", f"/{key}", pattern(size, number))
            for key, path in at.items():
                number = int(key.partition("-")[2])
                assert one.get("through", key) == pattern(MIDDLE, number), path
            for number in range(24):
                assert one.get("through", f"cold-{number}") == pattern(MIDDLE, number + 100)
            until(lambda: volumes(one)[frozen]["state"] == "stalled")
            assert volumes(one)[healthy]["state"] == "ok"
            assert one.ask("GET", "/-/readyz")[0] == 200
            assert one.metric("forebay_volume_stalled") == 1
            written = {key: future.result(2 * PATIENCE_S) for key, future in sent.items()}
            assert {status for status, _ in written.values()} == {200, 503}
            assert all(str(a.path).encode() in body for status, body in written.values() if status == 503)
            for key, data in kept.items():
                status, body = answers(one, "GET", f"/{key}")
                assert status == 503 or body == data, key
            refused = [key for key in kept if answers(one, "PUT", f"/{key}", b"newer")[0] == 503]
            assert 0 < len(refused) < len(kept)
            for number in range(24):
                assert one.get("through", f"warm-{number}") == pattern(MIDDLE, number)
            until(lambda: one.metric("forebay_dirty_objects") == 0 or "is flushed when the disk" in one.log)
        until(lambda: volumes(one)[frozen]["state"] == "ok")
    for key, data in kept.items():
        bucket, _, name = key.partition("/")
        assert one.get(bucket, name) == (data if key in refused else b"newer")
    for key, (status, _) in written.items():
        bucket, _, name = key.partition("/")
        found, body = answers(one, "GET", f"/{key}")
        size, number = SIZES[name.split("-")[1]], int(name.split("-")[2])
        assert (found, body) == (200, pattern(size, number)) or (status == 503 and found == 404), (key, status, found)
        until(lambda key=key: answers(one, "PUT", f"/{key}", b"after")[0] == 200, "that it is written to again")
        assert one.get(bucket, name) == b"after"
    assert one.children()["engine"]
    assert "hangs" not in one.log


def test_copies_and_appends_stop_nothing_else_where_their_disk_is_frozen(two: tuple[NodeProcess, Disk, Disk]) -> None:
    one, a, b = two
    frozen, healthy = str(a.path / "v"), str(b.path / "v")
    source = keys_on(one, healthy, "large", pattern(LARGE, 1), 1)[0]
    asked = {"x-amz-copy-source": f"/here/{source}"}
    copies, shards, others = ({at: keys_on(one, at, kind, b"before", 4) for at in (frozen, healthy)} for kind in MADE)
    uploads: dict[str, str] = {}
    for key in (*others[frozen], *others[healthy]):
        status, told = answers(one, "POST", f"/here/{key}?uploads")
        assert status == 200
        uploads[key] = told.partition(b"<UploadId>")[2].partition(b"<")[0].decode()
    for key in (*shards[frozen], *shards[healthy]):
        assert answers(one, "DELETE", f"/here/{key}")[0] == 204
        assert append(one, key, "first", pattern(MIDDLE, 1))[0] == 200
    with ThreadPoolExecutor(32) as clients:
        with a.frozen():
            sent: dict[str, dict[str, Future[tuple[int, bytes]]]] = {frozen: {}, healthy: {}}
            for at, of_volume in sent.items():
                for key in copies[at]:
                    of_volume[key] = clients.submit(answers, one, "PUT", f"/here/{key}", None, asked)
                for key in others[at]:
                    target = f"/here/{key}?partNumber=1&uploadId={uploads[key]}"
                    of_volume[key] = clients.submit(answers, one, "PUT", target, None, asked)
                for key in shards[at]:
                    of_volume[key] = clients.submit(append, one, key, "second", pattern(MIDDLE, 2))
            for key in (source, *copies[healthy]) * 4:
                assert answers(one, "GET", f"/here/{key}")[0] == 200
            until(lambda: volumes(one)[frozen]["state"] == "stalled")
            for key, future in sent[frozen].items():
                status, body = future.result(2 * PATIENCE_S)
                assert status == 503, (key, status, body)
                assert str(a.path).encode() in body
            for key, future in sent[healthy].items():
                status, body = future.result(2 * PATIENCE_S)
                assert status == 200, (key, status, body)
            for key in copies[healthy]:
                assert answers(one, "PUT", f"/here/{key}", None, asked)[0] == 200
        until(lambda: volumes(one)[frozen]["state"] == "ok")
    for at, body in ((frozen, b"before"), (healthy, pattern(LARGE, 1))):
        for key in copies[at]:
            assert answers(one, "GET", f"/here/{key}") == (200, body), key
    for key in (*shards[frozen], *shards[healthy]):
        assert append(one, key, "third", b"3")[0] == 200
    for key, upload in uploads.items():
        assert answers(one, "DELETE", f"/here/{key}?uploadId={upload}")[0] == 204
    for volume in (a, b):
        rest = [volume.path / "v" / "tmp", volume.path / "v" / "parts"]
        until(
            lambda rest=rest: not [file for each in rest for file in each.rglob("*") if file.is_file()], f"{rest} empty"
        )
    assert "hangs" not in one.log


def keys_on(one: NodeProcess, volume: str, name: str, body: bytes, count: int) -> list[str]:
    """Put objects into `here` until the volume has `count` of them; return their keys."""
    found: list[str] = []
    for number in range(1000):
        key = f"{number}-{name}"
        assert answers(one, "PUT", f"/here/{key}", body)[0] == 200
        if where(one, "here", key) == volume:
            found.append(key)
        if len(found) == count:
            return found
    raise AssertionError(f"of 1000 objects {len(found)} lie on {volume}")


def append(one: NodeProcess, shard: str, name: str, body: bytes) -> tuple[int, bytes]:
    return answers(one, "POST", f"/-/v1/members/here/{shard}?name={name}", body)
