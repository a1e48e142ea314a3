"""The host door of a real node: who is let in, what is given, and what a lease in another process means."""

from __future__ import annotations

import array
import asyncio
import fcntl
import json
import os
import random
import signal
import socket
import stat
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from forebay.client.sync import Client
from forebay.core import limits
from forebay.core.errors import NotFound, Precondition, Unavailable
from forebay.core.messages import doorwire
from forebay.core.messages.batch import Item
from forebay.core.messages.doorwire import (
    DoorClosed,
    DoorCold,
    DoorDropped,
    DoorError,
    DoorFile,
    DoorHello,
    DoorInline,
    DoorOpen,
    DoorOpened,
    DoorRefused,
    DoorUsed,
    DoorWelcome,
)
from forebay.core.types import RangeSpec
from tests.patience import PATIENCE_S

from .conftest import MIB, NodeProcess, pattern, until

pytestmark = pytest.mark.real
LARGE = pattern(9 * MIB + 5)


class Guest:
    """A client of the door that keeps to no rule but its own."""

    def __init__(self, path: str, token: str | None = "") -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(90)
        self.sock.connect(path)
        self.frames = doorwire.answer_frames()
        self.fds: list[int] = []
        self.messages: list[Any] = []
        self.number = 0
        if token is not None:
            self.say(DoorHello(token))

    def close(self) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def say(self, message: Any) -> None:
        self.sock.sendall(doorwire.encode(message))

    def hear(self) -> Any:
        """The next message; None when the front ended the connection."""
        while not self.messages:
            with self.frames.room() as room:
                try:
                    size, passed, flags, _ = self.sock.recvmsg_into(
                        [room], socket.CMSG_SPACE(4 * limits.DOOR_FILES_MAX), socket.MSG_CMSG_CLOEXEC
                    )
                except ConnectionResetError:
                    return None
            assert not flags & socket.MSG_CTRUNC
            for _, _, data in passed:
                self.fds += array.array("i", data)
            if not size:
                return None
            self.messages += self.frames.wrote(size)
        return self.messages.pop(0)

    def open(self, *objects: tuple[str, str], proves: bool = False) -> list[Any]:
        self.number += 1
        self.say(DoorOpen(self.number, list(objects), proves))
        opened = self.hear()
        assert isinstance(opened, DoorOpened), opened
        assert opened.number == self.number
        return opened.results

    def file(self, bucket: str, key: str) -> tuple[DoorFile, int]:
        """The object's file, and its descriptor; what was fetched a moment ago may take another until it is listed."""
        before = len(self.fds)
        (result,) = until(lambda: [found for found in self.open((bucket, key)) if isinstance(found, DoorFile)])
        assert len(self.fds) == before + 1
        return result, self.fds[-1]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node for the tests that leave it as it is; each has a bucket of its own."""
    one = NodeProcess(tmp_path_factory.mktemp("door"), "--fronts", "1")
    one.start()
    yield one
    one.stop()


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A directory that is a bucket; its name is the test's own."""
    path = tmp_path / tmp_path.name.replace("_", "-")[:40].strip("-")
    path.mkdir()
    (path / "small").write_bytes(b"hello")
    (path / "large").write_bytes(LARGE)
    (path / "empty").write_bytes(b"")
    return path


@pytest.fixture
def guest() -> Iterator[Callable[..., Guest]]:
    made: list[Guest] = []

    def make(one: NodeProcess, token: str | None = "", *, hello: bool = True) -> Guest:
        made.append(Guest(str(one.dir / "node" / "run" / "door-0.sock"), token if hello else None))
        if hello:
            assert isinstance(made[-1].hear(), DoorWelcome)
        return made[-1]

    yield make
    for one in made:
        one.close()


def warm(one: NodeProcess, bucket: Path, *keys: str, freshness_s: float = 1e18) -> str:
    """The bucket's name; these objects of it are in the node, and the index lists them."""
    name = bucket.name
    one.add_bucket(name, f"file://{bucket}", freshness_s=freshness_s)
    for key in keys:
        assert one.get(name, key) == (bucket / key).read_bytes()
    wanted = {key: (bucket / key).stat().st_size for key in keys}

    def listed() -> bool:
        rows = {row[0]: row[4] for row in one.json("GET", f"list/{name}?cached=1")[0]}
        return all(rows.get(key) == size for key, size in wanted.items())

    until(listed)
    return name


def locked(path: Path) -> bool:
    """Whether somebody holds a lease on the file, so that the node could punch no hole into it."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def data_file(one: NodeProcess, object_id: int) -> Path:
    (path,) = (one.dir / "node" / "volumes").rglob(f"{object_id:016x}")
    return path


Invite = Callable[..., Guest]


def test_what_is_here_is_given_and_what_is_not_is_cold(shared: NodeProcess, bucket: Path, guest: Invite) -> None:
    name = warm(shared, bucket)
    asked = guest(shared)
    assert asked.open((name, "small"), (name, "large")) == [DoorCold(), DoorCold()], "nothing was fetched yet"
    warm(shared, bucket, "small", "large", "empty")
    small, large, empty, gone, nowhere, odd = asked.open(
        (name, "small"), (name, "large"), (name, "empty"), (name, "no such key"), ("nowhere", "x"), ("-members", "x")
    )
    assert isinstance(small, DoorInline)
    assert isinstance(large, DoorFile)
    assert isinstance(empty, DoorInline)
    assert (small.body, large.size_bytes, empty.body) == (b"hello", len(LARGE), b"")
    assert (gone, nowhere) == (DoorCold(), DoorCold())
    assert isinstance(odd, DoorError)
    assert odd.error.kind == "Invalid"
    (fd,) = asked.fds
    assert os.pread(fd, len(LARGE) + 1, 0) == LARGE
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY


def test_a_descriptor_carries_a_lease_of_its_own(shared: NodeProcess, bucket: Path, guest: Invite) -> None:
    name = warm(shared, bucket, "large")
    shared.get(name, "large")  # a hit: the front has the file open now, and keeps it
    asked = guest(shared)
    file, fd = asked.file(name, "large")
    path = data_file(shared, file.object_id)
    fcntl.flock(fd, fcntl.LOCK_UN)
    assert locked(path), "the front's lease is another"
    fcntl.flock(fd, fcntl.LOCK_SH)
    shared.json("POST", "evict", {"bucket": name, "keys": ["large"]})
    assert asked.hear() == DoorDropped([file.object_id])
    until(lambda: not path.exists())
    assert os.pread(fd, len(LARGE), 0) == LARGE, "what was given stays readable"
    assert asked.open((name, "large")) == [DoorCold()]


def test_a_lease_holds_off_holes_until_it_is_closed(node: Any, bucket: Path, guest: Invite) -> None:
    """A node that has to make room takes blocks out of a large object: not out of one that is read here."""
    for number, size_bytes in enumerate((32 * MIB, 32 * MIB, 16 * MIB)):  # little enough that not all of the first goes
        (bucket / f"huge{number}").write_bytes(pattern(size_bytes, number))
    one = node("--fronts", "1", "--capacity", "68MiB")
    name = warm(one, bucket, "huge0")
    asked = guest(one)
    file, fd = asked.file(name, "huge0")
    path = data_file(one, file.object_id)
    one.get(name, "huge1")
    one.get(name, "huge2")
    assert asked.hear() == DoorDropped([file.object_id]), "it was asked for"
    data = pattern(32 * MIB, 0)
    assert all(os.pread(fd, MIB, at) == data[at : at + MIB] for at in range(0, 32 * MIB, MIB)), "and holds no zeros"
    whole = os.fstat(fd).st_blocks
    assert whole * 512 >= 32 * MIB
    asked.close()
    until(lambda: not path.exists() or path.stat().st_blocks < whole)


def test_a_replaced_object_is_dropped(shared: NodeProcess, bucket: Path, guest: Invite) -> None:
    name = warm(shared, bucket, "large")
    asked = guest(shared)
    before, _ = asked.file(name, "large")
    newer = pattern(5 * MIB, 7)
    assert shared.ask("PUT", f"/-/v1/objects/{name}/large", body=newer)[0] == 200
    assert asked.hear() == DoorDropped([before.object_id])
    after, fd = asked.file(name, "large")
    assert after.etag != before.etag
    assert os.pread(fd, len(newer) + 1, 0) == newer


def test_only_what_is_fresh_is_given(shared: NodeProcess, bucket: Path, guest: Invite) -> None:
    shared.add_bucket("strict", f"file://{bucket}", freshness_s=0.0)
    shared.get("strict", "large")
    name = warm(shared, bucket, "large", freshness_s=2.0)
    asked = guest(shared)
    file, _ = asked.file(name, "large")
    assert file.fresh_until_s <= time.time() + 2
    assert asked.open(("strict", "large")) == [DoorCold()]
    until(lambda: asked.open((name, "large")) == [DoorCold()])
    assert time.time() >= file.fresh_until_s
    shared.get(name, "large")  # the node asks the backend, and knows that it is current
    asked.file(name, "large")


def test_what_is_not_whole_is_cold(shared: NodeProcess, bucket: Path, guest: Invite) -> None:
    (bucket / "huge").write_bytes(pattern(40 * MIB))
    name = warm(shared, bucket)
    shared.get(name, "huge", (30 * MIB, 31 * MIB))
    asked = guest(shared)
    assert asked.open((name, "huge")) == [DoorCold()]
    warm(shared, bucket, "huge")
    asked.file(name, "huge")


def test_who_compares_the_bytes_gets_what_the_front_did_not_compare(shared: NodeProcess, guest: Invite) -> None:
    body = pattern(65 * MIB)  # more than a guest waits for
    shared.json("PUT", "buckets/written", {"name": "written", "url": "local://", "write": "local"})
    assert shared.ask("PUT", "/-/v1/objects/written/huge", body=body)[0] == 200
    asked = guest(shared)
    (file,) = asked.open(("written", "huge"), proves=True)
    assert isinstance(file, DoorFile)
    assert not file.compared
    assert os.pread(asked.fds[-1], MIB, 64 * MIB) == body[64 * MIB :]
    with Client(shared.endpoint) as client:
        buffer = bytearray(MIB)
        assert client.door.readinto("written", "huge", MIB, buffer, proves=True) == MIB
        assert buffer == body[MIB : 2 * MIB]
        assert client.door.readinto("written", "huge", MIB, buffer) is None, "what is open is for who compares"
    file, _ = asked.file("written", "huge")
    assert file.compared, "the front has done it by now"


def test_uses_are_counted_and_must_make_sense(shared: NodeProcess, bucket: Path, guest: Invite) -> None:
    name = warm(shared, bucket, "large", "small")
    asked = guest(shared)
    file, _ = asked.file(name, "large")
    assert shared.metric("forebay_door_connections") >= 1
    assert shared.metric("forebay_door_files_total") >= 1
    before = shared.metric("forebay_reads_total")
    asked.say(DoorUsed([file.object_id, 0, 3, 12345, 0, 1], 100, 100 * 4096))
    asked.open((name, "small"))
    assert shared.metric("forebay_reads_total") == before + 101
    asked.say(DoorUsed([file.object_id, 0, 4]))
    assert asked.hear() is None, "it has three blocks"
    asked = guest(shared)
    asked.say(DoorUsed([1, 2]))
    assert asked.hear() is None


def test_guests_without_manners_are_shown_out(shared: NodeProcess, bucket: Path, guest: Invite) -> None:
    name = (warm(shared, bucket, "large"), "large")
    hello = bytes(doorwire.encode(DoorHello()))
    for said in (
        doorwire.encode(DoorOpen(1, [name])),  # no hello
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        doorwire.encode(DoorWelcome("x")),
        hello * 2,
        hello + doorwire.encode(DoorOpen(1, [])),
        hello + doorwire.encode(DoorOpen(1, [name] * (limits.DOOR_FILES_MAX + 1))),
        hello + doorwire.encode(DoorOpen(1, [name])) * (limits.DOOR_ASKS_MAX + 1),
    ):
        rude = guest(shared, None, hello=False)
        rude.sock.sendall(said)
        while (heard := rude.hear()) is not None:
            assert isinstance(heard, DoorWelcome)
    old = guest(shared, None, hello=False)
    old.say(DoorHello(version=99))
    refused = old.hear()
    assert isinstance(refused, DoorRefused)
    assert "use HTTP" in refused.error.message
    assert old.hear() is None
    guest(shared).file(*name)  # the others are served


def test_a_connection_holds_so_many_and_no_more(shared: NodeProcess, bucket: Path, guest: Invite) -> None:
    count, most = limits.DOOR_GIVEN_MAX + 10, limits.DOOR_FILES_MAX
    for number in range(count):
        (bucket / f"m{number}").write_bytes(pattern(17_000, number))
    name = warm(shared, bucket)
    job = shared.json("POST", "prefetch", {"bucket": name, "prefix": "m"})["job"]
    until(lambda: shared.json("GET", f"jobs/{job}")["state"] == "done")
    until(lambda: len(shared.json("GET", f"list/{name}?cached=1")[0]) == count)
    asked = guest(shared)
    results: list[Any] = []
    for start in range(0, count, most):
        results += asked.open(*((name, f"m{number}") for number in range(start, min(start + most, count))))
    assert [isinstance(result, DoorFile) for result in results] == [True] * limits.DOOR_GIVEN_MAX + [False] * 10
    for number in (0, 100, limits.DOOR_GIVEN_MAX - 1):
        assert os.pread(asked.fds[number], 20_000, 0) == pattern(17_000, number), "each is in its place"
    asked.say(DoorClosed([result.object_id for result in results[:20]]))
    asked.file(name, f"m{count - 1}")
    assert len(os.listdir(f"/proc/{shared.children()['front 0']}/fd")) < 200, "the front kept none of them"


def test_identities_are_those_of_http(node: Any, bucket: Path, guest: Invite, tmp_path: Path) -> None:
    keys = tmp_path / "identities.json"
    admin = {"name": "admin", "allow": "admin:*", "token": "boss"}
    reader = {"name": "reader", "allow": "read:files", "token": "read-me"}

    def write(*entries: dict[str, str]) -> None:
        (tmp_path / "new").write_text(json.dumps({"identities": entries}))
        (tmp_path / "new").chmod(0o600)
        (tmp_path / "new").replace(keys)

    write(admin, reader)
    one = node("--fronts", "1", "--identities", str(keys))
    bearer = {"Authorization": "Bearer boss"}
    for name in ("files", "other"):
        body = json.dumps({"name": name, "url": f"file://{bucket}", "freshness_s": 1e18}).encode()
        assert one.ask("PUT", f"/-/v1/buckets/{name}", bearer, body)[0] == 200
        assert one.ask("GET", f"/-/v1/objects/{name}/large", bearer)[0] == 200
    assert one.ask("GET", "/-/v1/door")[0] == 403
    at = json.loads(one.ask("GET", "/-/v1/door", {"Authorization": "Bearer read-me"})[1])
    assert at["path"] == str(one.dir / "node" / "run" / "door-0.sock")
    for token in ("", "guess"):
        stranger = guest(one, token, hello=False)
        stranger.say(DoorHello(token))
        refused = stranger.hear()
        assert isinstance(refused, DoorRefused)
        assert refused.error.kind == "Denied"
        assert stranger.hear() is None
    asked = guest(one, "read-me")
    mine, other, unknown = asked.open(("files", "large"), ("other", "large"), ("nowhere", "large"))
    assert isinstance(mine, DoorFile)
    assert isinstance(other, DoorError)
    assert isinstance(unknown, DoorError)
    assert (other.error.kind, unknown.error.kind) == ("Denied", "NotFound")
    assert len(asked.fds) == 1
    write(admin)
    assert asked.hear() is None, "who is no longer let in is shown out"
    again = guest(one, "read-me", hello=False)
    again.say(DoorHello("read-me"))
    assert isinstance(again.hear(), DoorRefused)


def test_a_bucket_that_changes_ends_what_was_decided(shared: NodeProcess, bucket: Path, guest: Invite) -> None:
    name = warm(shared, bucket, "large")
    asked = guest(shared)
    asked.file(name, "large")
    shared.add_bucket("one-more", f"file://{bucket}")
    assert asked.open(("one-more", "large")) == [DoorCold()], "one more changes nothing"
    shared.add_bucket(name, f"file://{bucket}", freshness_s=0.0)
    assert asked.hear() is None
    assert guest(shared).open((name, "large")) == [DoorCold()]


def test_an_engine_that_was_away_may_have_dropped_anything(shared: NodeProcess, bucket: Path, guest: Invite) -> None:
    name = warm(shared, bucket, "large")
    asked = guest(shared)
    file, fd = asked.file(name, "large")
    os.kill(shared.children()["engine"], signal.SIGKILL)
    assert asked.hear() is None
    assert os.pread(fd, 100, 0) == LARGE[:100]
    until(lambda: shared.ask("GET", "/-/readyz")[0] == 200)
    assert guest(shared).file(name, "large")[0].object_id == file.object_id


def test_a_front_that_dies_leaves_no_lease_and_its_door_comes_back(
    shared: NodeProcess, bucket: Path, guest: Invite
) -> None:
    name = warm(shared, bucket, "large")
    asked = guest(shared)
    file, _ = asked.file(name, "large")
    path, pid = data_file(shared, file.object_id), shared.children()["front 0"]
    os.kill(pid, signal.SIGKILL)
    assert asked.hear() is None
    assert locked(path), "by us"
    asked.close()
    assert not locked(path)
    until(lambda: shared.children().get("front 0", pid) != pid)

    def answers() -> bool:
        with suppress(OSError):
            return shared.ask("GET", "/-/readyz")[0] == 200
        return False

    until(answers)
    guest(shared).file(name, "large")


def test_the_socket_is_its_users_alone_and_goes_with_the_node(node: Any, bucket: Path, guest: Invite) -> None:
    one = node("--fronts", "0")
    at = one.json("GET", "door")
    path = Path(at["path"])
    assert path == one.dir / "node" / "run" / "door-0.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    name = warm(one, bucket, "large")
    file, fd = guest(one).file(name, "large")
    assert os.pread(fd, file.size_bytes, 0) == LARGE, "engine and front in one process have one too"
    one.stop()
    assert not path.exists()


def test_a_path_that_is_too_long_leaves_a_node_without_a_door(tmp_path: Path) -> None:
    from forebay.node.front.front import Front
    from forebay.node.settings import Settings

    async def run() -> None:
        front = Front(Settings(str(tmp_path / ("d" * 120))), 0)
        front.door.start()
        assert front.door.at is None
        front.door.stop()

    asyncio.run(run())


# --- with the client that people use ---------------------------------------------------------------------------------
def test_a_client_on_this_host_reads_files_and_asks_http_for_the_rest(shared: NodeProcess, bucket: Path) -> None:
    name = warm(shared, bucket, "large", "small")
    with Client(shared.endpoint) as client:
        items = [Item(name, "large", 5 * MIB, 6 * MIB), Item(name, "small"), Item(name, "empty"), Item(name, "none")]
        found = client.door.read_many(items)
        assert found == [LARGE[5 * MIB : 6 * MIB], b"hello", None, None]
        before = shared.metric("forebay_reads_total")
        for _ in range(50):
            assert client.door.pread(name, "large", 9 * MIB, 5) == LARGE[9 * MIB :]
        client.door.close()
        until(lambda: shared.metric("forebay_reads_total") >= before + 50)
        many = client.get_many(items, on_error="report")
        assert [many[0], many[1], many[2]] == [LARGE[5 * MIB : 6 * MIB], b"hello", b""]
        assert isinstance(many[3], NotFound)


def test_files_are_one_version_however_they_are_read(shared: NodeProcess, bucket: Path) -> None:
    name = warm(shared, bucket, "large")
    with Client(shared.endpoint) as client, Client(shared.endpoint) as remote:
        remote.door.off()
        near, far = client.open(name, "large"), remote.open(name, "large")
        assert client.door.files_open == 1
        assert (near.size, near.etag) == (far.size, far.etag)
        assert near.read(MIB) == far.read(MIB) == LARGE[:MIB]
        client.door.off()  # what was begun in the file goes on over HTTP
        assert near.read(MIB) == LARGE[MIB : 2 * MIB]
        with remote.open(name, "large", "wb") as file:
            file.write(pattern(20 * MIB, 3))
        for reader in (near, far):
            reader.seek(6 * MIB)
            with pytest.raises(Precondition):
                reader.read(10)
        with remote.open(name, "large") as file:
            assert file.readall() == pattern(20 * MIB, 3)


def test_what_a_client_writes_it_reads(shared: NodeProcess, bucket: Path) -> None:
    name = warm(shared, bucket)
    with Client(shared.endpoint) as client:
        for number in range(10):
            with client.open(name, "mine", "wb") as file:
                file.write(pattern(200_000, number))
            assert client.get(name, "mine") == pattern(200_000, number)
            with client.open(name, "mine") as reader:
                assert reader.readall() == pattern(200_000, number), number


def test_no_reader_ever_sees_a_hole_or_another_version(node: Any, bucket: Path, tmp_path: Path) -> None:
    """Processes read through descriptors while everything is evicted, fetched again, and a front dies."""
    one = node("--fronts", "2", "--capacity", "72MiB")
    datas = {f"k{number}": pattern(12 * MIB + number, number) for number in range(8)}
    for key, data in datas.items():
        (bucket / key).write_bytes(data)
    name, enough = warm(one, bucket), tmp_path / "enough"

    def read(seed: int) -> None:
        """Read until it is enough and a descriptor answered some; fails if any byte is wrong."""
        chance, near = random.Random(seed), 0
        with Client(one.endpoint) as client:
            while not (near and enough.exists()):
                items = []
                for _ in range(20):
                    key = chance.choice(sorted(datas))
                    start = chance.randrange(len(datas[key]) - 100_000)
                    items.append(Item(name, key, start, start + chance.randrange(1, 100_000)))
                for item, body in zip(items, client.door.read_many(items), strict=True):
                    if body is None:
                        spec = RangeSpec(item.start, (item.end or 0) - 1)
                        with suppress(Unavailable):  # of a front that dies
                            assert client.get(name, item.key, range=spec) == datas[item.key][item.start : item.end]
                    else:
                        assert body == datas[item.key][item.start : item.end], (item, "a hole or another version")
                        near += 1

    children = []
    for seed in range(3):
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(PATIENCE_S))
            try:
                read(seed)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(2)
        children.append(pid)
    for turn in range(6):
        time.sleep(0.5)  # the readers' time
        one.json("POST", "evict", {"bucket": name, "keys": [f"k{turn}"]})
        if turn == 3:
            os.kill(one.children()["front 1"], signal.SIGKILL)
    enough.touch()
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]


def test_a_descriptor_is_reopened_for_writing_by_the_nodes_user_alone(
    shared: NodeProcess, bucket: Path, guest: Invite
) -> None:
    """docs/security.md says who can write through the door: who may write the file."""
    name = warm(shared, bucket, "large")
    asked = guest(shared)
    _, fd = asked.file(name, "large")
    os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))  # we are the node's user
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    child = os.fork()
    if not child:
        status = 1
        with suppress(BaseException):
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            assert os.pread(fd, 10, 0) == LARGE[:10]
            for flags in (os.O_RDWR, os.O_WRONLY, os.O_RDONLY):
                with pytest.raises(PermissionError):
                    os.open(f"/proc/self/fd/{fd}", flags)
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
