"""What the engine asks of the node that keeps second copies, where a disk here fails in between."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.core.cluster.records import Map, Presence
from forebay.core.errors import Unavailable
from forebay.core.messages.calls import DeleteCall, ObjectNamed, PutCall, TagCall
from forebay.core.messages.copied import ClearCopy
from forebay.core.s3rules.tags import tags_among
from forebay.core.types import LOCAL_URL, Bucket
from forebay.node.engine.replicas import COMPARED_FOR_S, Replicas
from tests.patience import until_async

from .conftest import MIB, Rig, pattern
from .writing import put, written

Rigged = Callable[..., None]


class OtherNode:
    """Keeps what it is told to, and says so."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self.tags: str | None = ""  # of what it was told to keep last
        self.is_silent = False

    async def keep_copy(self, home: Any, bucket: str, key: str, about: Any, body: Any) -> None:
        if self.is_silent:
            raise Unavailable("it does not answer")
        self.kept.add(key)
        self.tags = tags_among(about.headers)

    async def clear_copy(self, home: Any, call: ClearCopy) -> None:
        self.kept.discard(call.key)

    async def compare_copies(self, home: Any, call: Any) -> list[str]:
        return [key for key, _ in call.listed if key not in self.kept]


def _beside_another(rig: Rig, now_s: Callable[[], float] | None = None) -> tuple[Replicas, OtherNode]:
    engine, other = rig.engine, OtherNode()
    both = {engine.node_id: 1.0, "other": 1.0}
    agreed = Map(1, True, both, both, both, held=1)
    alive = {name: Presence(f"{name} lives", 1, 1) for name in both}
    seat: Any = SimpleNamespace(agreed=agreed, alive=alive, place_of=lambda node: node, covered=lambda held: None)

    async def nothing() -> None: ...

    kept: Any = SimpleNamespace(tidy=nothing, take_all_over=nothing, waiting=False)
    peers: Any = other
    clock: Any = SimpleNamespace(monotonic_s=now_s or engine.clock.monotonic_s)
    engine.writes.replicas = replicas = Replicas(
        seat, peers, engine.node_id, clock, kept,
        store=engine.store, index=engine.index, buckets=engine.buckets, writes=engine.writes, flusher=engine.flusher,
        volumes=engine.volumes, flush=engine.flush, is_whole=lambda: True,
    )  # fmt: skip
    return replicas, other


def test_what_could_not_be_deleted_here_is_kept_by_the_other_node_again(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node forgets its copy before it is deleted here. If that fails, the object is still there."""

    async def story(rig: Rig) -> None:
        replicas, other = _beside_another(rig)
        await rig.engine.buckets.put(Bucket("own", LOCAL_URL, write="local", copies=2))
        await rig.engine.writes.put(PutCall("own", "key", 5, body=b"bytes"))
        await replicas._tend_once()
        assert other.kept == {"key"}
        assert replicas.sent.to_compare(replicas._seat.agreed, replicas._seat.alive) is None  # type: ignore[arg-type]

        async def refuse(change: Any) -> None:
            raise Unavailable("the disk does not answer")

        monkeypatch.setattr(rig.engine.writes.commits, "commit", refuse)
        with pytest.raises(Unavailable):
            await rig.engine.writes.delete(DeleteCall("own", "key"))
        monkeypatch.undo()
        assert rig.engine.store.owned("own", "key") is not None
        await replicas._tend_once()
        assert other.kept == {"key"}

    rigged(story)


def test_tags_are_kept_by_the_other_node_before_anybody_reads_them(rigged: Rigged) -> None:
    """If it does not keep them, they are not set: whoever took over would have the old ones."""

    async def story(rig: Rig) -> None:
        _, other = _beside_another(rig)
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
        replicas, other = _beside_another(rig)
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


def test_a_copy_that_was_lost_is_made_again_within_an_hour(rigged: Rigged) -> None:
    now_s = [1000.0]

    async def story(rig: Rig) -> None:
        replicas, other = _beside_another(rig, lambda: now_s[0])
        await rig.engine.buckets.put(Bucket("own", LOCAL_URL, write="local", copies=2))
        await rig.engine.writes.put(PutCall("own", "key", 5, body=b"bytes"))
        await replicas._tend_once()
        other.kept.clear()  # with the volume on which it was
        await replicas._tend_once()
        assert not other.kept, "nobody compares all the time"
        now_s[0] += COMPARED_FOR_S
        await replicas._tend_once()
        assert other.kept == {"key"}

    rigged(story)
