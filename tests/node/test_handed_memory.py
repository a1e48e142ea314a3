"""Bodies that a client on the node's host hands over as memory: what becomes an object, and what is refused."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from forebay.client.shared import SharedMemory
from forebay.client.sync import Client
from forebay.core import limits
from forebay.core.errors import Invalid
from forebay.core.messages import doorwire
from forebay.core.messages.doorwire import DoorTake, DoorTook, DoorWelcome
from forebay.core.types import LOCAL_URL

from .conftest import MIB, NodeProcess, pattern, until
from .test_door import Guest

pytestmark = pytest.mark.real
BODY = pattern(9 * MIB + 5)


def sums_of(body: bytes) -> list[int]:
    block = limits.BLOCK_BYTES
    return [xxhash.xxh3_64_intdigest(body[at : at + block]) for at in range(0, len(body), block)]


def memory_of(body: bytes) -> SharedMemory:
    memory = SharedMemory(len(body))
    memory.view(len(body))[:] = body
    return memory


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    one = NodeProcess(tmp_path_factory.mktemp("handed"), "--fronts", "1")
    one.start()
    one.json("PUT", "buckets/here", {"name": "here", "url": LOCAL_URL, "write": "local", "durability": "disk"})
    yield one
    one.stop()


@pytest.fixture
def guest() -> Iterator[Callable[..., Guest]]:
    made: list[Guest] = []

    def make(one: NodeProcess, token: str = "") -> Guest:
        made.append(Guest(str(one.dir / "node" / "run" / "door-0.sock"), token))
        welcome = made[-1].hear()
        assert isinstance(welcome, DoorWelcome)
        assert welcome.takes
        return made[-1]

    yield make
    for one in made:
        one.close()


Invite = Callable[..., Guest]


def say(asked: Guest, message: DoorTake, *fds: int) -> None:
    socket.send_fds(asked.sock, [doorwire.encode(message)], list(fds))


def hand(asked: Guest, key: str, body: bytes, fd: int, sums: list[int] | None = None, bucket: str = "here") -> Any:
    """What the front says of it; None if it ended the connection."""
    asked.number += 1
    say(asked, DoorTake(asked.number, bucket, key, len(body), sums_of(body) if sums is None else sums), fd)
    took = asked.hear()
    assert took is None or (isinstance(took, DoorTook) and took.number == asked.number)
    return took


def left_over(one: NodeProcess) -> list[Path]:
    """Bodies that are on their way, or were left."""
    return [path for folder in (one.dir / "node" / "volumes").rglob("tmp") for path in folder.iterdir()]


def test_memory_that_is_handed_over_is_the_object_that_a_put_would_make(shared: NodeProcess, guest: Invite) -> None:
    asked, memory = guest(shared), memory_of(BODY)
    for key in ("first", "second"):  # one after the other, at one connection
        took = hand(asked, key, BODY, memory.fd)
        assert took.error is None
        assert took.written.size_bytes == len(BODY)
        assert shared.get("here", key) == BODY
    assert took.written.etag.endswith("-x")
    memory.view(1)[:] = b"x"
    assert shared.get("here", "second") == BODY, "the memory is the client's again"
    with Client(shared.endpoint) as client:
        assert client.head("here", "second").etag == took.written.etag
    shared.stop()
    shared.start()
    assert shared.get("here", "second") == BODY
    assert left_over(shared) == []


def test_other_bytes_than_the_client_says_are_refused(shared: NodeProcess, guest: Invite) -> None:
    shared.ask("PUT", "/-/v1/objects/here/kept", body=b"as it was")
    wrong, memory = sums_of(BODY), memory_of(BODY)
    wrong[1] ^= 1
    for sums in (wrong, wrong[:1], []):
        took = hand(guest(shared), "kept", BODY, memory.fd, sums)
        assert (took.error.kind, took.error.code) == ("Invalid", "BadDigest")
    assert shared.get("here", "kept") == b"as it was"
    until(lambda: left_over(shared) == [])


def test_only_memory_that_cannot_shrink_is_read(shared: NodeProcess, guest: Invite, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BODY)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.truncate(unsealed, len(BODY))
    pipe, short, small = os.pipe(), memory_of(BODY[:-1]), memory_of(BODY)
    with open(tmp_path / "file", "rb") as file, tempfile.TemporaryFile(dir="/dev/shm") as other:
        other.truncate(len(BODY))
        for fd in (file.fileno(), other.fileno(), unsealed, *pipe, short.fd):
            took = hand(guest(shared), "odd", BODY, fd)
            assert took.error.kind == "Invalid"
            assert "HTTP" in took.error.message
    for fd in (unsealed, *pipe):
        os.close(fd)
    assert hand(guest(shared), "odd", b"few", small.fd).error.kind == "Invalid", "few bytes need no descriptor"
    assert shared.ask("GET", "/-/v1/objects/here/odd")[0] == 404


def test_who_hands_over_no_memory_or_two_at_once_is_shown_out(shared: NodeProcess, guest: Invite) -> None:
    take = DoorTake(1, "here", "rude", len(BODY), sums_of(BODY))
    memory = memory_of(BODY)
    asked = guest(shared)
    asked.say(take)
    assert asked.hear() is None
    asked = guest(shared)
    say(asked, take, memory.fd, memory.fd)
    assert asked.hear() is None
    asked = guest(shared)
    frame = doorwire.encode(take)
    socket.send_fds(asked.sock, [frame[:10]], [memory.fd])
    socket.send_fds(asked.sock, [frame[10:] + frame], [memory.fd])
    while (heard := asked.hear()) is not None:
        assert isinstance(heard, DoorTook)
    until(lambda: left_over(shared) == [])
    assert len(os.listdir(f"/proc/{shared.children()['front 0']}/fd")) < 100


def test_a_client_that_goes_leaves_the_object_whole_or_as_it_was(shared: NodeProcess, guest: Invite) -> None:
    memory = memory_of(BODY)
    for number in range(8):
        asked = guest(shared)
        say(asked, DoorTake(1, "here", f"left-{number}", len(BODY), sums_of(BODY)), memory.fd)
        asked.sock.close()
    until(lambda: left_over(shared) == [])
    for number in range(8):
        status, body = shared.ask("GET", f"/-/v1/objects/here/left-{number}")
        assert status == 404 or body == BODY


def test_rights_are_those_of_http_and_who_wrote_is_in_the_audit_log(node: Any, guest: Invite, tmp_path: Path) -> None:
    keys = tmp_path / "identities.json"
    writer = {"name": "writer", "allow": "write:here", "token": "mine"}
    admin = {"name": "admin", "allow": "admin:*", "token": "boss"}
    keys.write_text(json.dumps({"identities": [admin, writer]}))
    keys.chmod(0o600)
    one = node("--fronts", "1", "--identities", str(keys), "--audit", "changes")
    for name in ("here", "other"):
        made = json.dumps({"name": name, "url": LOCAL_URL, "write": "local"}).encode()
        assert one.ask("PUT", f"/-/v1/buckets/{name}", {"Authorization": "Bearer boss"}, made)[0] == 200
    memory = memory_of(BODY)
    kinds = {}
    for bucket in ("here", "other", "nowhere"):
        took = hand(guest(one, "mine"), "key", BODY, memory.fd, bucket=bucket)
        kinds[bucket] = took.error and took.error.kind
    assert kinds == {"here": None, "other": "Denied", "nowhere": "NotFound"}
    assert one.ask("GET", "/-/v1/objects/here/key", {"Authorization": "Bearer boss"}) == (200, BODY)

    def told() -> list[dict[str, Any]]:
        lines = [
            line for path in (one.dir / "node" / "log").glob("audit-*.jsonl") for line in path.read_text().splitlines()
        ]
        return [each for each in map(json.loads, lines) if each["operation"] == "DoorTake"]

    until(lambda: len(told()) >= 2)
    said = [(each["identity"], each["bucket"], each["key"], each["status"]) for each in told()]
    assert said[:2] == [("writer", "here", "key", 200), ("writer", "other", "key", 403)]


def test_a_client_uses_it_and_is_refused_in_words(shared: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(BODY)
    with Client(shared.endpoint) as client:
        with monkeypatch.context() as nothing_is_sent:
            nothing_is_sent.setattr(Client, "put", None)
            written = client.put_shared("here", "by client", memory, len(BODY), sums_of(BODY))
        assert client.get("here", "by client") == BODY
        assert client.head("here", "by client").etag == written.etag
        with pytest.raises(Invalid, match="other digests"):
            client.put_shared("here", "by client", memory, len(BODY), [0, 0, 0])
        client.put_shared("here", "small", memory, 100, [])
        assert client.get("here", "small") == BODY[:100], "few bytes go over HTTP"
        client.door.off()
        client.put_shared("here", "sent", memory, len(BODY), sums_of(BODY))
        assert client.get("here", "sent") == BODY, "and so do all from another host"
    assert fcntl.fcntl(memory.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
