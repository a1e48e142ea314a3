"""Room for small objects: what they take is counted, and what they leave is taken again."""

from __future__ import annotations

import errno
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.core import limits
from forebay.core.errors import Unavailable
from forebay.core.record import Record, State
from forebay.node.store.disk.usage import VolumeUsage
from forebay.node.store.disk.volume import Volume
from tests.store import owned_objects as owning
from tests.store import store_objects as objects
from tests.store.owned_objects import Writer
from tests.store.store_objects import BUCKET, Bench

KIB = 1024
MIB = 1024 * KIB
GROUP = 64


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A filesystem of 32 MiB in memory, or of as much as is asked for."""
    size = getattr(request, "param", "32m")
    path = tmp_path / "disk"
    path.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "forebay-test", str(path)], capture_output=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no mount program here")
    if done.returncode:
        pytest.skip("mounting a small filesystem is refused here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def sizes(seed: int) -> Iterator[int]:
    """Up to what lives in a record, most of them large."""
    chance = random.Random(seed)
    while True:
        yield chance.choice((chance.randrange(1, 2 * KIB), chance.randrange(1, limits.INLINE_BYTES_MAX + 1)))


def fill(writer: Writer, seed: int, state: State, name: str = "k") -> list[str]:
    """Write small objects, in groups, until one is refused; the keys of those that were not."""
    kept: list[str] = []
    each = sizes(seed)
    for _ in range(1000):
        puts = [writer.put(f"{name}{len(kept) + n:05d}", next(each), state=state) for n in range(GROUP)]
        outcomes = owning.commit(writer.bench.store, puts)
        kept += [put.info.key for put, one in zip(puts, outcomes, strict=True) if isinstance(one, Record)]
        refused = [one for one in outcomes if isinstance(one, Unavailable)]
        if refused:
            assert {one.code for one in refused} == {"InsufficientStorage"}
            return kept
        assert len(kept) % GROUP == 0, outcomes
    raise AssertionError("the disk does not fill")


def empty(writer: Writer, keys: list[str], *, note: bool) -> None:
    for first in range(0, len(keys), GROUP):
        deletes = [writer.delete(key, note=note) for key in keys[first : first + GROUP]]
        assert owning.commit(writer.bench.store, deletes) == [None] * len(deletes)
    writer.bench.store.settle()
    writer.bench.store.housekeep()


def _fill_by_others(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4 * KIB))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def usage(bench: Bench) -> VolumeUsage:
    return bench.store.usage()[0]


@pytest.mark.parametrize("state", [State.LOCAL, State.DIRTY])
def test_a_disk_filled_with_small_objects_and_emptied_takes_about_as_many_again(
    disk: Path, make_bench: Callable[..., Bench], state: State
) -> None:
    """The dirty ones while the backend is away: their tombstones stay."""
    bench = make_bench("disk/v0")
    writer = Writer(bench)
    first = fill(writer, 1, state)
    full = usage(bench)
    assert full.capacity_bytes > 24 * MIB
    assert full.used_bytes > 0.85 * full.capacity_bytes
    again = first
    for restarted in (False, True, False):
        empty(writer, again, note=state == State.DIRTY)
        if restarted:
            bench.close()
            bench.open()
        now = usage(bench)
        assert now.objects == 0
        assert now.used_bytes < 0.1 * full.used_bytes
        assert now.capacity_bytes > 0.75 * full.capacity_bytes, "free pages are room"
        again = fill(writer, 1, state)
        assert len(again) > 0.75 * len(first)
    assert "changes-lost" not in bench.kinds()
    for key in again[::17]:
        record = bench.store.lookup(BUCKET, key)
        assert record is not None
        assert owning.read(bench, key) == objects.make(key, record.size_bytes, "w1")[1]


def test_what_a_read_brings_goes_into_free_pages_of_a_full_disk(disk: Path, make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("disk/v0")
    writer = Writer(bench)
    kept = fill(writer, 2, State.LOCAL)
    _fill_by_others(disk / "others")
    bench.store.usable()[0].free_bytes(fresh=True)
    with pytest.raises(Unavailable):
        objects.land(bench.store, "large", 100 * KIB)
    empty(writer, kept, note=False)
    info, data = objects.make("small", 9000)
    bench.store.put_inline(BUCKET, info, data, checked_s=1.0)
    bench.store.flush()
    assert owning.read(bench, "small") == data
    with pytest.raises(Unavailable):
        objects.land(bench.store, "large", 100 * KIB)
    assert "changes-lost" not in bench.kinds()


@pytest.mark.parametrize("disk", ["300m"], indirect=True)
def test_a_disk_that_others_fill_while_much_is_in_the_journal(disk: Path, make_bench: Callable[..., Bench]) -> None:
    """What LMDB has yet to hear of finds room, deletes are taken, and what they leave is room again."""
    bench = make_bench("disk/v0")
    writer = Writer(bench)
    keys = [f"k{number:03d}" for number in range(600)]
    for first in range(0, len(keys), 20):
        outcomes = owning.commit(bench.store, [writer.put(key, 9000) for key in keys[first : first + 20]])
        assert all(isinstance(outcome, Record) for outcome in outcomes)
    durable = bench.store.usable()[0].durable
    assert sum(path.stat().st_size for path in Path(durable.path).glob("journal.*")) >= 2 * MIB
    _fill_by_others(disk / "others")
    bench.store.usable()[0].free_bytes(fresh=True)
    fill(writer, 1, State.DIRTY, "more")
    empty(writer, keys[:400], note=True)
    assert sum(path.stat().st_size for path in Path(durable.path).glob("journal.*")) == 0, "the disk has it back"
    again = fill(writer, 2, State.DIRTY, "again")
    assert len(again) > 200
    bench.close(clean=False)
    bench.open()
    for key in [*keys[400::7], *again[::7]]:
        assert bench.store.lookup(BUCKET, key) is not None, key


def test_a_refusal_says_what_helps(disk: Path, make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("disk/v0")
    writer = Writer(bench)
    kept = fill(writer, 3, State.LOCAL)
    with pytest.raises(Unavailable, match="the disk is full of what only this node has"):
        raise owning.commit(bench.store, [writer.put("more", limits.INLINE_BYTES_MAX, state=State.LOCAL)])[0]  # type: ignore[misc]
    empty(writer, kept, note=False)
    with pytest.raises(Unavailable, match=r"for objects up to 16 KiB only.*restart the node to give it back"):
        bench.store.free_to_write(BUCKET, "large", 8 * MIB)
    bench.close()
    bench.open()
    bench.store.free_to_write(BUCKET, "large", 8 * MIB)
    objects.land(bench.store, "large", 8 * MIB)


def test_a_capacity_bounds_what_small_objects_take(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("v0", capacity_bytes=16 * MIB)
    writer = Writer(bench)
    kept = fill(writer, 4, State.DIRTY)
    volume = bench.store.usable()[0]
    taken = volume.free_pages.now.used_bytes + volume.durable.free_pages.now.used_bytes
    payload = usage(bench).owed_bytes
    assert payload < 0.6 * taken, "both indexes have them"
    assert usage(bench).used_bytes <= usage(bench).capacity_bytes == 16 * MIB
    assert 14 * MIB < taken < 17 * MIB
    with pytest.raises(Unavailable, match="raise --capacity"):
        bench.store.free_to_write(BUCKET, "large", 4 * MIB)
    empty(writer, kept, note=True)
    assert len(fill(writer, 4, State.DIRTY)) > 0.8 * len(kept)


@pytest.mark.parametrize("size", [10, 700, 1900, 4096, 16384])
def test_what_a_small_object_is_said_to_take_is_what_it_takes(make_bench: Callable[..., Bench], size: int) -> None:
    bench = make_bench("v0")
    volume = bench.store.usable()[0]
    before = volume.free_pages.now.used_bytes
    count = 4 * MIB // (size + 1000)
    keys = [f"some/prefix/{number:06d}.jpg" for number in range(count)]
    random.Random(5).shuffle(keys)
    for number, key in enumerate(keys):
        info, data = objects.make(key, size)
        bench.store.put_inline(BUCKET, info, data, checked_s=1.0)
        if number % 100 == 99:
            bench.store.flush()
    bench.store.flush()
    taken = volume.free_pages.now.used_bytes - before
    assert 0.75 * taken < volume.usage.small_bytes < 1.35 * taken
    assert usage(bench).used_bytes == volume.usage.small_bytes + max(
        0, taken + before - 256 * KIB - volume.usage.small_bytes
    )


def test_a_start_that_dies_after_it_gave_pages_back_loses_nothing(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench("v0")
    writer = Writer(bench)
    keys = [f"k{number:05d}" for number in range(600)]
    for first in range(0, len(keys), 100):
        owning.commit(bench.store, [writer.put(key, 16 * KIB, state=State.LOCAL) for key in keys[first : first + 100]])
    left = keys[::50]
    empty(writer, [key for key in keys if key not in left], note=False)
    for stop in ("write_mark", "make_ballast", ""):
        bench.close(clean=False)
        if stop:
            with monkeypatch.context() as patch:
                patch.setattr(Volume, stop, _killed)
                with pytest.raises(RuntimeError, match="killed"):
                    bench.open()
        bench.open()
        assert [key for key in keys if bench.store.lookup(BUCKET, key) is not None] == left
        assert [owning.read(bench, key) for key in left] == [objects.make(key, 16 * KIB, "w1")[1] for key in left]
        assert usage(bench).owned_objects == len(left)
    volume = bench.store.usable()[0]
    assert volume.mark.index > 1
    assert volume.free_pages.now.free_bytes + volume.durable.free_pages.now.free_bytes < MIB, "both gave them back"
    assert bench.events == []


def _killed(volume: Volume) -> None:
    raise RuntimeError("killed")
