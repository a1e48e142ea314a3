"""What happens to real etcd members happens here: killed, frozen, cut off, compacted, emptied; and to their clients."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
import urllib.request
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from bench import servers
from forebay.core.errors import Invalid, Precondition, Unavailable
from forebay.meta import etcd as etcd_module
from forebay.meta.etcd import EtcdMeta, parse_url
from forebay.meta.etcd_link import Address
from forebay.ports.clock import SystemClock
from tests.meta.relay import Relay
from tests.meta.watched import Watched
from tests.patience import PATIENCE_S, until_async

PATIENT_S = 60.0  # for calls that must succeed, however busy the machine is


@pytest.fixture(autouse=True)
def look_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_module, "LOOK_S", 0.1)


@pytest.fixture
def cluster(etcd: servers.EtcdCluster) -> Iterator[servers.EtcdCluster]:
    """The three members; those that a test kills run again afterwards."""
    yield etcd
    for member in etcd.members:
        if not member.running:
            member.restart(wait=False)
    for member in etcd.members:
        member.wait_ready()


@pytest.fixture(scope="module")
def other() -> Iterator[servers.EtcdCluster]:
    with servers.EtcdCluster(1) as started:
        yield started


def meta_at(*addresses: Address, namespace: str = "", patience_s: float = PATIENT_S) -> EtcdMeta:
    return EtcdMeta(addresses, namespace or uuid.uuid4().hex, patience_s=patience_s)


def ask(address: Address, path: str, question: dict[str, Any]) -> dict[str, Any]:
    """Past the product."""
    host, port = address
    request = urllib.request.Request(f"http://{host}:{port}{path}", json.dumps(question).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_a_killed_member_is_missed_by_nobody(cluster: servers.EtcdCluster) -> None:
    async def story() -> None:
        meta = meta_at(*cluster.addresses)
        async with Watched(meta, "") as watched:
            await meta.put("before", b"1")
            await watched.until(lambda state: "before" in state)
            cluster.members[0].kill()
            revision = await meta.put("after", b"1", revision=0)
            assert await meta.put("after", b"2", revision=revision) > revision
            cluster.members[0].restart()
            cluster.members[1].kill()
            await meta.delete("before")
            await watched.until(lambda state: state == {"after": b"2"})
            told = [change.revision for changes in watched.heard for change in changes]
            assert told == sorted(set(told)), "each once, in order"
        await meta.aclose()

    asyncio.run(story())


def test_a_frozen_member_stops_no_write_and_its_watch_goes_on_elsewhere(cluster: servers.EtcdCluster) -> None:
    async def story() -> None:
        meta = meta_at(*cluster.addresses, patience_s=5.0)
        frozen = cluster.members[0].pid
        async with Watched(meta, "") as watched:
            try:
                os.kill(frozen, signal.SIGSTOP)
                while not await succeeds(meta.put("while it stands still", b"1")):
                    pass  # the others elect a leader, on whatever the machine has left for them
                await watched.until(lambda state: state == {"while it stands still": b"1"})
            finally:
                os.kill(frozen, signal.SIGCONT)
        await meta.aclose()

    asyncio.run(story())


def test_without_a_majority_calls_fail_in_time_and_the_lease_is_not_relied_on(cluster: servers.EtcdCluster) -> None:
    async def story() -> None:
        namespace = uuid.uuid4().hex
        meta = meta_at(*cluster.addresses, namespace=namespace)
        hasty = meta_at(*cluster.addresses, namespace=namespace, patience_s=0.2)
        async with Watched(meta, "") as watched, hasty.hold(2.0, SystemClock()) as held:
            await held.number()
            await meta.put("key", b"1")
            for member in cluster.members[1:]:
                member.kill()
            began_s = time.monotonic()
            for call in (
                hasty.get("key"),
                hasty.range(""),
                hasty.put("key", b"2"),
                hasty.delete("key"),
                hasty.transact({"key": b"2"}, when={"key": 0}),
                hasty.grant(10.0),
                hasty.renew(1),
                hasty.revoke(1),
            ):
                with pytest.raises(Unavailable, match="etcd does not answer: check its members"):
                    await call
            assert time.monotonic() - began_s < 60.0, "calls have a bound; this one is for a busy machine"
            await until_async(lambda: not held.holds(), "the holder stopped relying on its lease")
            for member in cluster.members[1:]:
                member.restart(wait=False)
            await meta.put("again", b"1")
            await watched.until(lambda state: "again" in state)
            await until_async(held.holds, "a lease is held again")
        await hasty.aclose()
        await meta.aclose()

    asyncio.run(story())


def test_a_watch_that_was_cut_off_goes_on_where_it_was(
    cluster: servers.EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_module, "LOOK_S", PATIENCE_S)  # a look would tell the difference alone

    async def story() -> None:
        async with Relay(cluster.addresses[0]) as relay:
            namespace = uuid.uuid4().hex
            near, far = meta_at(cluster.addresses[1], namespace=namespace), meta_at(relay.address, namespace=namespace)
            await near.put("key", b"0")
            async with Watched(far, "") as watched:
                relay.cut()
                for number in (1, 2):
                    await near.put("key", b"%d" % number)
                await near.delete("key")
                await near.put("last", b"")
                relay.mend()
                await watched.until(lambda state: state == {"last": b""})
                told = [(change.key, change.value) for changes in watched.heard for change in changes]
                assert told == [("key", b"0"), ("key", b"1"), ("key", b"2"), ("key", None), ("last", b"")]
            await near.aclose()
            await far.aclose()

    asyncio.run(story())


def test_a_watch_for_which_history_is_compacted_tells_what_is_different(cluster: servers.EtcdCluster) -> None:
    async def story() -> None:
        async with Relay(cluster.addresses[0]) as relay:
            namespace = uuid.uuid4().hex
            near, far = meta_at(cluster.addresses[1], namespace=namespace), meta_at(relay.address, namespace=namespace)
            kept = await near.transact({"kept": b"", "changed": b"0", "gone": b""})
            async with Watched(far, "") as watched:
                relay.cut()
                await near.put("changed", b"1")
                await near.delete("gone")
                changed = await near.put("changed", b"2")
                last = await near.put("new", b"")
                ask(cluster.addresses[1], "/v3/kv/compaction", {"revision": str(last)})
                relay.mend()
                await watched.until(lambda state: state == {"kept": b"", "changed": b"2", "new": b""})
                told = [(change.key, change.revision) for change in watched.heard[-1]]
                assert ("changed", changed) in told
                assert ("kept", kept) not in told, "what stayed is not told again"
                await near.delete("kept")
                await watched.until(lambda state: "kept" not in state)
            await near.aclose()
            await far.aclose()

    asyncio.run(story())


def test_a_frozen_watch_is_noticed_though_its_connection_stands(cluster: servers.EtcdCluster) -> None:
    async def story() -> None:
        async with Relay(cluster.addresses[0]) as relay:
            namespace = uuid.uuid4().hex
            near = meta_at(cluster.addresses[1], namespace=namespace)
            far = meta_at(relay.address, cluster.addresses[2], namespace=namespace, patience_s=3.0)
            await near.put("there", b"")
            async with Watched(far, "") as watched:
                relay.freeze()
                await near.delete("there")
                await watched.until(lambda state: not state)
            await near.aclose()
            await far.aclose()

    asyncio.run(story())


def test_a_store_that_was_emptied_is_told_as_it_is_now(other: servers.EtcdCluster) -> None:
    async def story() -> None:
        meta = meta_at(*other.addresses)
        for number in range(5):
            await meta.put(f"old {number}", b"")
        async with Watched(meta, "") as watched:
            other.members[0].kill()
            shutil.rmtree(other.members[0].dir / "data")
            other.members[0].restart()
            await meta.put("new", b"1")
            await watched.until(lambda state: state == {"new": b"1"})
            await meta.put("new", b"2")
            await watched.until(lambda state: state == {"new": b"2"})
        await meta.aclose()

    asyncio.run(story())


def test_a_member_of_another_cluster_is_not_believed_and_gets_nothing(
    cluster: servers.EtcdCluster, other: servers.EtcdCluster
) -> None:
    async def story() -> None:
        async with Relay(cluster.addresses[0]) as relay:
            namespace = uuid.uuid4().hex
            meta = meta_at(relay.address, *other.addresses, namespace=namespace, patience_s=1.0)
            while not await succeeds(meta.put("key", b"1")):
                pass
            relay.cut()
            await refused(lambda: meta.get("key"), "correct the endpoints")
            said = await refused(lambda: meta.put("key", b"2"), "correct the endpoints")
            assert "may or may not" not in said, "nobody heard the write"
            await meta.aclose()
            strangers = meta_at(*other.addresses, namespace=namespace)
            assert (await strangers.range(""))[0] == []
            await strangers.aclose()

    asyncio.run(story())


async def succeeds(call: Awaitable[object]) -> bool:
    try:
        await call
    except Unavailable:
        return False
    return True


async def refused(call: Callable[[], Awaitable[object]], why: str) -> str:
    """What the call is refused with, as soon as that says why: a busy machine has its own reasons before."""
    while True:
        with pytest.raises(Unavailable) as error:
            await call()
        if why in str(error.value):
            return str(error.value)


def test_a_write_without_an_answer_is_sent_once_and_said_to_be_in_doubt(cluster: servers.EtcdCluster) -> None:
    async def story() -> None:
        async with Relay(cluster.addresses[0]) as relay:
            namespace = uuid.uuid4().hex
            near = meta_at(cluster.addresses[1], namespace=namespace)
            far = meta_at(relay.address, namespace=namespace, patience_s=1.5)
            relay.deaf_to = b"/v3/kv/txn"
            await refused(lambda: far.put("key", b"1", revision=0), "read before you decide anew")
            assert relay.heard.count(b"/v3/kv/txn") == 1
            with pytest.raises(Precondition):
                await near.put("key", b"2", revision=0)
            await near.aclose()
            await far.aclose()

    asyncio.run(story())


@pytest.mark.parametrize(
    "says",
    [
        None,
        b"",
        b"SSH-2.0-nothing\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
def test_what_is_no_etcd_is_an_error_that_says_so(says: bytes | None) -> None:
    """None: it listens and says nothing."""

    async def story() -> None:
        ended = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if says is None:
                await ended.wait()
            else:
                writer.write(says)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        meta = meta_at(server.sockets[0].getsockname(), patience_s=0.3)
        for call in (meta.get("key"), meta.put("key", b"")):
            with pytest.raises(Unavailable, match="etcd does not answer: check its members") as refused:
                await call
            assert "may or may not" not in str(refused.value)
        await meta.aclose()
        ended.set()
        server.close()

    asyncio.run(story())


def test_urls_name_members_and_a_namespace() -> None:
    assert parse_url("etcd://a:1,b,10.0.0.1:3") == ([("a", 1), ("b", 2379), ("10.0.0.1", 3)], "forebay")
    assert parse_url("etcd://[::1]:1,[fe80::1]/one/cluster/") == ([("::1", 1), ("fe80::1", 2379)], "one/cluster")
    for wrong in ("etcd://", "http://a:1", "etcd://a:b", "etcd://a:1,,b:2", "etcd://a:70000", "a:1", "etcd://:1"):
        with pytest.raises(Invalid):
            parse_url(wrong)
