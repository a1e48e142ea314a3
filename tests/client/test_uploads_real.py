"""Uploads in parts by the client, at a real node with identities: tokens, clients that die, answers that are lost."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.client import upload
from forebay.client.connection import CUT
from forebay.client.sync import Client
from forebay.core.errors import Denied, Precondition, Unavailable
from forebay.core.messages.calls import Written
from forebay.core.messages.http1 import Request, Response
from forebay.core.types import Bucket
from tests.node.conftest import MIB, NodeProcess, pattern
from tests.patience import PATIENCE_S

BUCKETS = ["kept", "straight", "here"]  # written back, through, and on the node alone
PART_BYTES = 5 * MIB
pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    folder: Path = tmp_path_factory.mktemp("uploads")
    known = [
        {"name": "admin", "token": "a", "allow": "admin:*"},
        {"name": "writer", "token": "w", "allow": "write:*,read:*"},
        {"name": "reader", "token": "r", "allow": "read:*"},
    ]
    identities = folder / "identities.json"
    identities.write_text(json.dumps({"identities": known}))
    identities.chmod(0o600)
    running = NodeProcess(folder, "--fronts", "1", "--identities", str(identities))
    running.start()
    try:
        with Client(running.endpoint, token="a") as admin:
            for name, write in zip(BUCKETS, ("back", "through", "local"), strict=True):
                (folder / name).mkdir()
                admin.bucket_put(
                    Bucket(name, "local://" if write == "local" else f"file://{folder / name}", write=write)
                )  # type: ignore[arg-type]
        yield running
    finally:
        running.stop()


class Counted(Client):
    """A client that counts parts, and may lose the answer to a completion."""

    parts = 0
    lose = 0

    def send(self, request: Request) -> Response:
        response = super().send(request)
        self.parts += request.target.startswith("/-/v1/parts/")
        if request.target.startswith("/-/v1/complete/") and self.lose:
            self.lose -= 1
            raise Unavailable("the answer was cut", code=CUT)
        return response


@pytest.fixture
def client(node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    with Counted(node.endpoint, token="w") as client:
        yield client


def send(client: Client, bucket: str, key: str, path: Path, plan: Any = None, progress: Any = None) -> Written:
    """The file, as one of 6 GiB goes."""
    with open(path, "rb") as file:
        size_bytes = path.stat().st_size
        flow = upload.put_file(
            bucket, key, file.fileno(), size_bytes, plan or upload.PutOptions(), progress, PART_BYTES, PART_BYTES
        )
        return client.run(flow)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_token_that_may_write_is_enough_for_every_size(
    client: Counted, node: NodeProcess, bucket: str, tmp_path: Path
) -> None:
    data = pattern(20 * MIB)
    for size_bytes in (10 * MIB, 20 * MIB):
        written = client.put(
            bucket, "stream", io.BytesIO(data[:size_bytes]), content_type="text/x", metadata={"a": "b"}
        )
        assert client.get(bucket, "stream") == data[:size_bytes]
        got = client.head(bucket, "stream")
        assert (got.etag, got.size_bytes) == (written.etag, written.size_bytes) == (got.etag, size_bytes)
        assert (got.headers["content-type"], got.headers["x-amz-meta-a"]) == ("text/x", "b")
    assert client.parts == 2
    (tmp_path / "file").write_bytes(data[: 11 * MIB])
    send(client, bucket, "file", tmp_path / "file")
    assert client.get(bucket, "file") == data[: 11 * MIB]
    with Client(node.endpoint, token="r") as reader:
        for put in (
            lambda: reader.put(bucket, "no", b"small"),
            lambda: reader.put(bucket, "no", io.BytesIO(data)),
            lambda: send(reader, bucket, "no", tmp_path / "file"),
        ):
            with pytest.raises(Denied):
                put()


@pytest.mark.parametrize("bucket", BUCKETS)
def test_conditions_hold_for_parts(client: Counted, bucket: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(pattern(11 * MIB, 1))
    first = send(client, bucket, "one", tmp_path / "file", upload.PutOptions(only_new=True))
    for plan in (upload.PutOptions(only_new=True), upload.PutOptions(if_match="other")):
        with pytest.raises(Precondition):
            send(client, bucket, "one", tmp_path / "file", plan)
    (tmp_path / "file").write_bytes(b"2" * (11 * MIB))
    send(client, bucket, "one", tmp_path / "file", upload.PutOptions(if_match=first.etag))
    assert client.get(bucket, "one") == b"2" * (11 * MIB)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_an_upload_whose_client_was_killed_is_gone_on_with(
    client: Counted, node: NodeProcess, bucket: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(pattern(17 * MIB, 2))
    script = f"""
import os, sys
from pathlib import Path
from forebay.client.sync import Client
from tests.client.test_uploads_real import send
sent = 0
def stop(size_bytes):
    global sent
    sent += size_bytes
    if sent > 12 << 20:
        os.kill(os.getpid(), 9)
with Client({node.endpoint!r}, token="w") as client:
    send(client, {bucket!r}, "resumed", Path({str(path)!r}), None, stop)
"""
    killed = subprocess.run([sys.executable, "-c", script], timeout=PATIENCE_S, capture_output=True)
    assert killed.returncode == -9, killed.stderr.decode()[-2000:]
    moved: list[int] = []
    send(client, bucket, "resumed", path, None, moved.append)
    assert client.parts == 2, "two of four were there"
    assert sum(moved) == 17 * MIB
    assert client.get(bucket, "resumed") == path.read_bytes()


@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_completion_whose_answer_was_lost_is_known_again(client: Counted, bucket: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(pattern(11 * MIB, 3))
    client.lose = 1
    written = send(client, bucket, "lost", path, upload.PutOptions(only_new=True))
    assert client.lose == 0
    assert (written.etag, written.size_bytes) == (client.head(bucket, "lost").etag, 11 * MIB)
    assert client.get(bucket, "lost") == path.read_bytes()
    client.lose = 2
    with pytest.raises(Unavailable, match="put the same file again"):
        send(client, bucket, "lost", path)
