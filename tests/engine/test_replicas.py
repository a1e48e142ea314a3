"""What the engine asks of the node that keeps second copies, where a disk here fails in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from forebay.core.cluster.records import Map, Presence
from forebay.core.errors import Unavailable, map_changes
from forebay.core.messages.calls import DeleteCall, ObjectNamed, PutCall, TagCall
from forebay.core.messages.copied import ClearCopy, Copied, CopiesSaid, KeepCopy, SendBack
from forebay.core.s3rules.tags import tags_among
from forebay.core.types import LOCAL_URL, Bucket
from forebay.node.engine import replicas as replicas_module
from forebay.node.engine.replicas import COMPARED_FOR_S, Replicas
from tests.patience import until_async

from .conftest import MIB, Rig, pattern
from .writing import incoming, put, written

Rigged = Callable[..., None]


class OtherNode:
    """Keeps what it is told to, and says so."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.kept: dict[str, tuple[Copied, bytes]] = {}
        self.tags: str | None = ""  # of what it was told to keep last
        self.is_silent = False
        self.sendings = 0

    async def keep_copy(self, home: Any, bucket: str, key: str, about: Any, body: Any) -> None:
        if self.is_silent:
            raise Unavailable("it does not answer")
        self.sendings += 1
        self.kept[key] = about, body.data if body.data is not None else Path(body.path).read_bytes()
        self.tags = tags_among(about.headers)

    async def clear_copy(self, home: Any, call: ClearCopy) -> None:
        if self.is_silent:
            raise Unavailable("it does not answer")
        self.kept.pop(call.key, None)

    async def compare_copies(self, home: Any, call: Any) -> list[str]:
        return [key for key, version in call.listed if key not in self.kept or self.kept[key][0].version != version]

    async def ask_copies(self, home: Any, call: Any) -> CopiesSaid:
        assert isinstance(call, SendBack)
        if call.key not in self.kept or self.kept[call.key][0].version != call.version:
            return CopiesSaid([call.key])
        engine, (about, body) = self.rig.engine, self.kept[call.key]
        path, sums = incoming(self.rig, call.key, body, call.bucket)
        assert engine.writes.replicas is not None
        await engine.writes.replicas.kept.takes_back(
            KeepCopy(call.bucket, call.key, about, len(body), path, None, sums, back=True)
        )
        return CopiesSaid()


def beside_another(rig: Rig, now_s: Callable[[], float] | None = None, covered: int = 0) -> tuple[Replicas, OtherNode]:
    """The engine's replicas, and the other node of the two that there are."""
    engine, other = rig.engine, OtherNode(rig)
    both = {engine.node_id: 1.0, "other": 1.0}
    agreed = Map(1, True, both, both, both, held=1, covered=covered)
    alive = {name: Presence(f"{name} lives", 1, 1) for name in both}
    seat: Any = SimpleNamespace(
        agreed=agreed, alive=alive, place_of=lambda node: node, covered=lambda due: None, next_map=asyncio.sleep
    )

    async def nothing() -> None: ...

    kept: Any = SimpleNamespace(tidy=nothing, take_all_over=nothing, waiting=False)
    peers: Any = other
    clock: Any = SimpleNamespace(monotonic_s=now_s or engine.clock.monotonic_s, wall_s=engine.clock.wall_s)
    engine.writes.replicas = replicas = Replicas(
        seat, peers, engine.node_id, clock, kept,
        store=engine.store, index=engine.index, buckets=engine.buckets, writes=engine.writes, flusher=engine.flusher,
        volumes=engine.volumes, flush=engine.flush, is_whole=lambda: True, lost_after_s=0.0,
    )  # fmt: skip
    return replicas, other


def test_what_could_not_be_deleted_here_is_kept_by_the_other_node_again(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node forgets its copy before it is deleted here. If that fails, the object is still there."""

    async def story(rig: Rig) -> None:
        replicas, other = beside_another(rig)
        await rig.engine.buckets.put(Bucket("own", LOCAL_URL, write="local", copies=2))
        await rig.engine.writes.put(PutCall("own", "key", 5, body=b"bytes"))
        await replicas._tend_once()
        assert set(other.kept) == {"key"}
        assert replicas.sent.to_compare(replicas._seat.agreed, replicas._seat.alive) is None  # type: ignore[arg-type]

        async def refuse(change: Any) -> None:
            raise Unavailable("the disk does not answer")

        monkeypatch.setattr(rig.engine.writes.commits, "commit", refuse)
        with pytest.raises(Unavailable):
            await rig.engine.writes.delete(DeleteCall("own", "key"))
        monkeypatch.undo()
        assert rig.engine.store.owned("own", "key") is not None
        await replicas._tend_once()
        assert set(other.kept) == {"key"}

    rigged(story)


@pytest.mark.parametrize("is_heard", [True, False])
@pytest.mark.parametrize("verb", ["put", "delete"])
def test_a_write_that_fails_here_is_refused_only_if_the_other_node_has_forgotten_it(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch, verb: str, is_heard: bool
) -> None:
    """It was, with "no room", while the other had what was refused, and would have taken it over."""

    async def story(rig: Rig) -> None:
        _, other = beside_another(rig)
        writes = rig.engine.writes
        await rig.engine.buckets.put(Bucket("own", LOCAL_URL, write="local", copies=2))
        await writes.put(PutCall("own", "key", 5, body=b"bytes"))

        async def refuse(change: Any) -> None:
            other.is_silent = not is_heard
            raise Unavailable("the disk is full", code="InsufficientStorage")

        monkeypatch.setattr(writes.commits, "commit", refuse)
        monkeypatch.setattr(replicas_module, "PATIENCE_S", 0.0)
        refused = (
            writes.put(PutCall("own", "key", 5, body=b"other"))
            if verb == "put"
            else writes.delete(DeleteCall("own", "key"))
        )
        with pytest.raises(Unavailable) as caught:
            await refused
        if is_heard:
            assert caught.value.code == "InsufficientStorage"
            assert other.kept["key"][1] == b"bytes"
        else:
            assert caught.value.code == ""
            assert "may have been written" in caught.value.message

    rigged(story)


def test_what_cannot_be_sent_now_is_not_cleared_at_the_other_node(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a write that is durable here and not in view yet: the other node has all that is left of the key."""

    async def story(rig: Rig) -> None:
        replicas, other = beside_another(rig)
        writes = rig.engine.writes
        await rig.engine.buckets.put(Bucket("own", LOCAL_URL, write="local", copies=2))
        await writes.put(PutCall("own", "key", 5, body=b"bytes"))

        async def refuse(change: Any) -> None:
            raise Unavailable("the index is full. It may have been written")

        monkeypatch.setattr(writes.commits, "commit", refuse)
        monkeypatch.setattr(replicas, "_of_store", lambda name: None)
        with pytest.raises(Unavailable, match="may have been written"):
            await writes.put(PutCall("own", "key", 5, body=b"other"))
        assert other.kept["key"][1] == b"other"

    rigged(story)


def test_a_delete_of_what_is_deleted_is_told_to_the_other_node(rigged: Rigged) -> None:
    """A write in between may have failed here, and be there."""

    async def story(rig: Rig) -> None:
        _, other = beside_another(rig)
        rig.remote.down = Unavailable("it is away")  # what is owed stays owed
        await rig.engine.buckets.put(Bucket("remote", "memory://remote", write="back", copies=2))
        await put(rig, "key", b"bytes")
        await rig.engine.writes.delete(DeleteCall("remote", "key"))
        assert other.kept["key"][0].is_delete
        other.kept["key"] = msgspec.structs.replace(other.kept["key"][0], is_delete=False), b"failed"
        await rig.engine.writes.delete(DeleteCall("remote", "key"))
        assert other.kept["key"][0].is_delete

    rigged(story)


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_delete_of_what_is_not_here_is_one_at_the_other_node(rigged: Rigged, is_heard: bool) -> None:
    """A write that failed here may have left a copy there, which would return if this node were lost."""

    async def story(rig: Rig) -> None:
        _, other = beside_another(rig)
        await rig.engine.buckets.put(Bucket("own", LOCAL_URL, write="local", copies=2))
        await rig.engine.writes.put(PutCall("own", "other", 5, body=b"bytes"))
        other.kept["key"] = other.kept["other"]
        other.is_silent = not is_heard
        if is_heard:
            await rig.engine.writes.delete(DeleteCall("own", "key"))
            assert set(other.kept) == {"other"}
        else:
            with pytest.raises(Unavailable):
                await rig.engine.writes.delete(DeleteCall("own", "key"))

    rigged(story)


@pytest.mark.parametrize("by_another_map", [True, False])
def test_a_delete_waits_for_a_node_that_goes_by_another_map_for_a_moment(rigged: Rigged, by_another_map: bool) -> None:
    """And for none that is away: a flush clears, too, and all flushes would wait for the keys of that one."""
    error = map_changes("ask by another map", 1.0) if by_another_map else Unavailable("it is not heard of")

    async def story(rig: Rig) -> None:
        _, other = beside_another(rig)
        await rig.engine.buckets.put(Bucket("own", LOCAL_URL, write="local", copies=2))
        await rig.engine.writes.put(PutCall("own", "key", 5, body=b"bytes"))
        clears, asked = other.clear_copy, 0

        async def refuse_once(home: Any, call: ClearCopy) -> None:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise error
            await clears(home, call)

        other.clear_copy = refuse_once  # type: ignore[method-assign]
        if by_another_map:
            await rig.engine.writes.delete(DeleteCall("own", "key"))
            assert (asked, other.kept, rig.engine.store.owned("own", "key")) == (2, {}, None)
        else:
            with pytest.raises(Unavailable, match="not heard of"):
                await rig.engine.writes.delete(DeleteCall("own", "key"))
            assert asked == 1

    rigged(story)


def test_lists_are_compared_at_once_only_after_one_that_counts(rigged: Rigged) -> None:
    """What fails meanwhile has the same node compared again: not without a pause."""

    async def story(rig: Rig) -> None:
        replicas, other = beside_another(rig)
        await rig.engine.buckets.put(Bucket("own", LOCAL_URL, write="local", copies=2))
        await rig.engine.writes.put(PutCall("own", "key", 5, body=b"bytes"))
        compare = other.compare_copies

        async def compare_amid(home: Any, call: Any) -> list[str]:
            replicas.sent.failed("other")
            return await compare(home, call)

        other.compare_copies = compare_amid  # type: ignore[method-assign]
        assert not await replicas._tend_once()
        other.compare_copies = compare  # type: ignore[method-assign]
        assert await replicas._tend_once()
        assert not await replicas._tend_once(), "all is compared"

    rigged(story)


def test_tags_are_kept_by_the_other_node_before_anybody_reads_them(rigged: Rigged) -> None:
    """If it does not keep them, they are not set: whoever took over would have the old ones."""

    async def story(rig: Rig) -> None:
        _, other = beside_another(rig)
        await rig.engine.buckets.put(Bucket("own", LOCAL_URL, write="local", copies=2))
        await rig.engine.writes.put(PutCall("own", "key", 5, body=b"bytes"))
        other.is_silent = True
        with pytest.raises(Unavailable):
            await rig.engine.tags.tag(TagCall("own", "key", "colour=red"))
        assert (await rig.engine.tags.read(ObjectNamed("own", "key"))).tags == ""
        other.is_silent = False
        await rig.engine.tags.tag(TagCall("own", "key", "colour=blue"))
        assert (await rig.engine.tags.read(ObjectNamed("own", "key"))).tags == other.tags == "colour=blue"

    rigged(story)


def test_what_rotted_here_before_another_node_had_it_does_not_count_as_kept(rigged: Rigged) -> None:
    """It was taken for sent, so the node said that all lay on two nodes, and let itself be taken over."""

    async def story(rig: Rig) -> None:
        replicas, other = beside_another(rig)
        await written(rig, "local", copies=2)
        await put(rig, "key", pattern(6 * MIB))
        await replicas._tend_once()
        record = rig.engine.store.lookup("remote", "key")
        assert record is not None
        with open(rig.engine.store.data_path(record), "r+b") as file:
            file.seek(5 * MIB)
            file.write(b"rot")
        rig.engine.cold.suspect("remote", "key", record.object_id, "a test")
        await until_async(lambda: any(rig.engine.store.partly_lost("remote")))

        other.kept.clear()
        replicas.sent.failed("other")
        with pytest.raises(Unavailable, match="rotted here"):
            await replicas._tend_once()

    rigged(story)


@pytest.mark.parametrize("how", ["rotten", "cut short", "gone"])
def test_what_is_lost_here_comes_back_from_the_node_that_keeps_it(rigged: Rigged, how: str) -> None:
    body = pattern(6 * MIB)

    async def story(rig: Rig) -> None:
        replicas, other = beside_another(rig)
        store = rig.engine.store
        await written(rig, "local", copies=2)
        await put(rig, "key", body)
        await replicas._tend_once()
        record = store.lookup("remote", "key")
        assert record is not None
        path = Path(store.data_path(record))
        if how == "gone":
            path.unlink()
        else:
            with open(path, "r+b") as file:
                file.truncate(5 * MIB)
                if how == "rotten":
                    file.truncate(6 * MIB)
        rig.engine.cold.suspect("remote", "key", record.object_id, "a test")
        await until_async(lambda: any(store.partly_lost("remote")) or store.lost_in("remote"))

        older, newest = other.kept["key"], msgspec.structs.replace(other.kept["key"][0], version=1)
        other.kept["key"] = newest, b"of another version"
        await replicas.returns.objects(replicas._agreed(), ["remote"])
        assert any(store.partly_lost("remote")) or store.lost_in("remote"), "only the very version takes its place"

        other.kept["key"] = older
        replicas.returns._asked.clear()  # or it waits a minute
        await replicas.returns.objects(replicas._agreed(), ["remote"])
        assert not store.lost_in("remote")
        assert not any(store.partly_lost("remote"))
        await replicas._tend_once()
        now = store.owned("remote", "key")
        assert now is not None
        assert Path(store.data_path(now)).read_bytes() == body
        assert other.kept["key"][0].version == now.object_id, "the other node has the new version"
        assert replicas.sent.covered(replicas._agreed(), replicas._seat.alive)

    rigged(story)


def test_a_copy_that_was_lost_is_made_again_within_an_hour(rigged: Rigged) -> None:
    now_s = [1000.0]

    async def story(rig: Rig) -> None:
        replicas, other = beside_another(rig, lambda: now_s[0])
        await rig.engine.buckets.put(Bucket("own", LOCAL_URL, write="local", copies=2))
        await rig.engine.writes.put(PutCall("own", "key", 5, body=b"bytes"))
        await replicas._tend_once()
        other.kept.clear()  # with the volume on which it was
        await replicas._tend_once()
        assert not other.kept, "nobody compares all the time"
        now_s[0] += COMPARED_FOR_S
        await replicas._tend_once()
        assert set(other.kept) == {"key"}

    rigged(story)


def test_of_three_nodes_that_disagree_all_are_compared_again(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    """One keeps what the other does not: the write is refused, and whoever took it must not have it for long. So it is
    with a delete."""

    async def story(rig: Rig) -> None:
        replicas, other = beside_another(rig)
        engine, seat = rig.engine, replicas._seat
        three = {engine.node_id: 1.0, "other": 1.0, "third": 1.0}
        seat.agreed = agreed = Map(1, True, three, three, three, held=1, covered=1)  # type: ignore[misc]
        seat.alive["third"] = Presence("third lives", 1, 1)
        third, nodes = OtherNode(rig), {"other": other}
        nodes["third"] = third

        class Both:
            def __getattr__(self, verb: str) -> Any:
                return lambda home, *more, **options: getattr(nodes[home], verb)(home, *more, **options)

        replicas._peers = Both()  # type: ignore[assignment]
        await engine.buckets.put(Bucket("own", LOCAL_URL, write="local", copies=3))
        await engine.writes.put(PutCall("own", "key", 5, body=b"bytes"))
        for _ in range(3):
            await replicas._tend_once()
        assert replicas.sent.to_compare(agreed, seat.alive) is None
        last = nodes[agreed.seconds(engine.node_id, "own", "key", 3)[1]]
        first = next(each for each in nodes.values() if each is not last)
        monkeypatch.setattr("forebay.node.engine.replicas.PATIENCE_S", 0.2)
        monkeypatch.setattr("forebay.node.engine.replicas.AGAIN_S", 0.02)

        async def refuse(home: Any, call: ClearCopy) -> None:
            raise Unavailable("it does not answer")

        last.is_silent, last.clear_copy = True, refuse  # type: ignore[method-assign]
        for act in (
            lambda: engine.writes.put(PutCall("own", "key", 7, body=b"refused")),
            lambda: engine.writes.delete(DeleteCall("own", "key")),
        ):
            first.sendings = 0
            with pytest.raises(Unavailable):
                await act()
            assert first.sendings <= 1, "it is sent the body again and again, since another refuses it"
            last.is_silent = False
            for _ in range(3):
                await replicas._tend_once()
            assert replicas.sent.to_compare(agreed, seat.alive) is None
            assert first.kept["key"][1] == last.kept["key"][1] == b"bytes"
            last.is_silent = True

    rigged(story)
