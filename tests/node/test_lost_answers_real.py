"""A real node in front of a real server of S3, whose answers are lost on the way: no write that happened is refused,
and none that is somebody else's is claimed."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from forebay.core import limits
from tests.patience import until

from .conftest import MIB, NodeProcess, pattern
from .lossy import Lossy

BIG = limits.MULTIPART_BYTES_MIN + MIB
ABSENT = {"If-None-Match": "*"}


class Scene:
    """A node whose buckets `through` and `back` lie behind the relay, and a look past it."""

    def __init__(self, one: NodeProcess, relay: Lossy, direct: str) -> None:
        self.node, self.relay, self._direct = one, relay, direct

    def there(self, key: str, bucket: str = "through") -> bytes:
        with urllib.request.urlopen(f"{self._direct}/{bucket}/{key}") as answer:
            return bytes(answer.read())

    def place(self, key: str, data: bytes) -> None:
        request = urllib.request.Request(f"{self._direct}/through/{key}", data, method="PUT")
        with urllib.request.urlopen(request):
            pass

    def etag(self, key: str) -> str:
        request = urllib.request.Request(f"{self._direct}/through/{key}", method="HEAD")
        with urllib.request.urlopen(request) as answer:
            return str(answer.headers["ETag"])

    def put(self, key: str, data: bytes, headers: dict[str, str]) -> int:
        return self.node.ask("PUT", f"/through/{key}", headers, data)[0]

    def uploads(self, bucket: str = "through") -> list[str]:
        """Keys of uploads that are open at the backend."""
        with urllib.request.urlopen(f"{self._direct}/{bucket}?uploads") as answer:
            return [each.decode() for each in re.findall(b"<Key>(.*?)</Key>", answer.read())]

    def kill_engine(self) -> None:
        os.kill(self.node.children()["engine"], signal.SIGKILL)

    def upload(self, key: str, data: bytes, headers: dict[str, str]) -> Callable[[], int]:
        """A client's own multipart upload: what completes it."""
        status, said = self.node.ask("POST", f"/through/{key}?uploads")
        assert status == 200, said
        found = re.search(b"<UploadId>(.*?)</UploadId>", said)
        assert found
        upload_id = found[1].decode()
        cut = limits.PART_BYTES_MIN
        listed = []
        for number, piece in enumerate((data[:cut], data[cut:]), 1):
            status, said = self.node.ask("PUT", f"/through/{key}?partNumber={number}&uploadId={upload_id}", {}, piece)
            assert status == 200, said
        _, said = self.node.ask("GET", f"/through/{key}?uploadId={upload_id}")
        for number, etag in enumerate(re.findall(b"<ETag>(.*?)</ETag>", said), 1):
            listed.append(f"<Part><PartNumber>{number}</PartNumber><ETag>{etag.decode()}</ETag></Part>")
        body = f"<CompleteMultipartUpload>{''.join(listed)}</CompleteMultipartUpload>".encode()
        return lambda: self.node.ask("POST", f"/through/{key}?uploadId={upload_id}", headers, body)[0]


@pytest.fixture(scope="module")
def scene(seaweed: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    for bucket in ("through", "back"):
        seaweed.create_bucket(bucket)
    relay = Lossy(seaweed.endpoint)
    one = NodeProcess(tmp_path_factory.mktemp("lossy"), "--fronts", "1")
    with closing(relay):
        try:
            one.start()
            for bucket in ("through", "back"):
                options = {"endpoint": relay.endpoint, "skip_signature": "true"}
                body = {
                    "name": bucket,
                    "url": f"s3://{bucket}",
                    "write": bucket,
                    "options": options,
                    "freshness_s": 0.0,
                }
                one.json("PUT", f"buckets/{bucket}", body)
            yield Scene(one, relay, seaweed.endpoint)
        finally:
            one.stop()


@pytest.mark.parametrize("size_bytes", [3_000, 5 * MIB, BIG])
def test_a_create_whose_answer_was_lost_happened(scene: Scene, size_bytes: int) -> None:
    """A small put, one that streams, and one that goes as an upload."""
    key, data = f"create-{size_bytes}", pattern(size_bytes, size_bytes)
    scene.relay.lose_once(*(("POST", f"/{key}?", "uploadId=") if size_bytes == BIG else ("PUT", f"/{key} ")))
    assert scene.put(key, data, ABSENT) == 200
    assert scene.relay.lost
    assert scene.there(key) == data
    assert scene.node.get("through", key) == data
    assert scene.put(key, b"second", ABSENT) == 412, "and that is the truth"


def test_a_change_whose_answer_was_lost_happened(scene: Scene) -> None:
    data = pattern(3_000, 2)
    scene.place("change", b"before")
    scene.relay.lose_once("PUT", "/change ")
    assert scene.put("change", data, {"If-Match": scene.etag("change")}) == 200
    assert scene.relay.lost
    assert scene.there("change") == data
    assert scene.node.get("through", "change") == data


@pytest.mark.parametrize("headers", [ABSENT, {}])
def test_a_clients_upload_whose_completion_was_not_heard_happened(scene: Scene, headers: dict[str, str]) -> None:
    key, data = f"upload-{len(headers)}", pattern(limits.PART_BYTES_MIN + 777, 5)
    complete = scene.upload(key, data, headers)
    scene.relay.lose_once("POST", f"/{key}?", "uploadId=")
    assert complete() == 200
    assert scene.relay.lost
    assert scene.there(key) == data
    assert scene.node.get("through", key) == data


def test_a_completion_that_is_repeated_after_nobody_heard_of_it_is_not_refused(scene: Scene) -> None:
    """Every answer is lost until the node gives up: the client completes again, and its own object is no obstacle."""
    data = pattern(limits.PART_BYTES_MIN + 99, 6)
    complete = scene.upload("again", data, ABSENT)
    scene.relay.seen.clear()
    scene.relay.lose = lambda line: "/again" in line and any(each.startswith("POST") for each in scene.relay.seen)
    assert complete() == 503
    assert scene.there("again") == data
    scene.relay.lose = lambda line: False
    assert complete() == 200
    assert scene.node.get("through", "again") == data
    assert scene.upload("again", data, ABSENT)() == 412


def test_a_delete_whose_answer_was_lost_happened(scene: Scene) -> None:
    scene.place("gone", b"here")
    scene.relay.lose_once("DELETE", "/gone ")
    assert scene.node.ask("DELETE", "/through/gone", {"If-Match": scene.etag("gone")})[0] == 204
    assert scene.relay.lost
    assert scene.node.ask("GET", "/through/gone")[0] == 404


def test_what_somebody_else_wrote_meanwhile_is_neither_claimed_nor_called_a_refusal(scene: Scene) -> None:
    """Ours was there, for a moment: 412 would say that it never was."""
    scene.relay.lose_once("PUT", "/race ")
    scene.relay.before = lambda: scene.place("race", b"theirs")
    assert scene.put("race", b"ours", ABSENT) == 503
    assert scene.node.get("through", "race") == b"theirs"


@pytest.mark.parametrize("size_bytes", [3_000, BIG])
def test_a_flush_whose_answer_was_lost_is_no_conflict(scene: Scene, size_bytes: int) -> None:
    key = f"flush-{size_bytes}"
    scene.relay.lose_once(*(("POST", f"/{key}?", "uploadId=") if size_bytes == BIG else ("PUT", f"/{key} ")))
    assert scene.node.ask("PUT", f"/back/{key}", {}, pattern(size_bytes, 1))[0] == 200
    until(lambda: scene.relay.lost)
    assert scene.node.ask("PUT", f"/back/{key}", {}, b"newer")[0] == 200
    until(lambda: scene.node.metric("forebay_dirty_objects") == 0)
    assert scene.there(key, "back") == b"newer"
    assert scene.node.metric("forebay_flush_conflicts_total") == 0


# --- uploads whose ids nobody heard ----------------------------------------------------------------------------------
def test_a_node_that_is_killed_while_it_sends_an_upload_aborts_it_at_its_next_start(scene: Scene) -> None:
    """It knows its id: that was noted before the first part."""
    scene.relay.lose_once("PUT", "/midway?", "partNumber=")
    scene.relay.before = scene.kill_engine
    scene.put("midway", pattern(BIG, 3), {})  # which the next engine may bring to a good end
    assert scene.relay.lost
    until(lambda: "midway" not in scene.uploads())


def test_an_upload_whose_id_was_lost_with_the_node_is_told_and_left(scene: Scene) -> None:
    """As another writer's must be, that has no parts yet either."""
    left = scene.node.metric("forebay_uploads_left_total")
    request = urllib.request.Request(f"{scene._direct}/through/begun?uploads", b"", method="POST")
    with urllib.request.urlopen(request):
        pass  # a stranger's
    scene.relay.lose_once("POST", "/begun?uploads")
    scene.relay.before = scene.kill_engine
    scene.put("begun", pattern(BIG, 4), {})
    assert scene.relay.lost
    until(lambda: "an upload of through/begun may be ours" in scene.node.log)
    until(lambda: scene.node.metric("forebay_uploads_left_total") >= left + 1)
    until(lambda: scene.uploads().count("begun") == 2)


def test_an_upload_that_is_begun_again_since_the_answer_was_lost_is_counted(scene: Scene) -> None:
    left = scene.node.metric("forebay_uploads_left_total")
    scene.relay.lose_once("POST", "/twice?uploads")
    assert scene.put("twice", pattern(BIG, 8), {}) == 200
    assert scene.uploads().count("twice") == 1
    until(lambda: scene.node.metric("forebay_uploads_left_total") == left + 1)
