"""Where a key is and what is here of it: readers and the writer give one answer."""

from __future__ import annotations

import errno
from collections.abc import Callable

import msgspec
import pytest

from forebay.core.machines.opening import MISSED
from forebay.core.messages.wire import VolumeAt
from forebay.core.record import Record
from forebay.core.types import FRESH_IMMUTABLE, Bucket
from forebay.node.store.reader import StoreReader
from forebay.node.store.whereabouts import Here
from forebay.node.store.writer.writer import Store

from .store_objects import BUCKET, Bench, land, make

KEYS = [f"folder/{number}" for number in range(60)]
NOW = 1_000.0


def put(store: Store, key: str, checked_s: float = NOW) -> Record:
    info, data = make(key, 100)
    record = store.put_inline(BUCKET, info, data, checked_s=checked_s)
    store.flush()
    return record


def test_writer_and_readers_agree_whatever_volumes_there_are(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("v0", "v1", "v2")
    for key in KEYS[::2]:
        put(bench.store, key)
    for gone in (None, 1, 0, 2):
        if gone is not None:
            bench.store._all[gone].trouble(OSError(errno.EIO, "it errs"), "reading")
            bench.store.flush()
        reader = bench.reader()
        told = [bench.store.here(BUCKET, key) for key in KEYS]
        assert [reader.here(BUCKET, key) for key in KEYS] == told
        assert {here.volume_id for here in told} == {at.volume_id for at in bench.store.volumes()} or gone == 2
        assert (gone is None) == all(here.record is not None for here in told[::2])
        assert all(here.record is None for here in told[1::2])
    assert told == [Here("", None)] * len(KEYS), "every volume is out"


def test_a_volume_whose_disk_does_not_answer_keeps_its_keys(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("v0", "v1")
    for key in KEYS:
        put(bench.store, key)
    first, second = bench.store.volumes()
    reader = StoreReader([VolumeAt(first.volume_id, first.path, True), second])
    try:
        for key in KEYS:
            at = bench.store.volume_of(BUCKET, key)
            assert reader.volume_of(BUCKET, key) == at
            assert (reader.lookup(BUCKET, key) is None) == (at == first.volume_id)
    finally:
        reader.close()


@pytest.mark.parametrize("side", ["writer", "reader"])
def test_what_of_a_key_will_do(bench: Bench, side: str) -> None:
    store, timed, settled = bench.store, Bucket(BUCKET, "", freshness_s=60.0), Bucket(BUCKET, "", FRESH_IMMUTABLE)
    record = put(store, "key")
    asked = store if side == "writer" else bench.reader()
    assert asked.fresh(timed, "key", NOW + 59) == record
    assert asked.fresh(timed, "key", NOW + 61) is None
    assert asked.fresh(settled, "key", NOW + 1e9) == record
    assert asked.fresh(settled, "other", NOW) is None
    assert asked.of_version(BUCKET, "key", "v1") == record
    assert asked.of_version(BUCKET, "key", f"~{record.object_id:x}") == record, "its name from before its flush"
    assert asked.of_version(BUCKET, "key", "v2") is None
    assert asked.of_object(BUCKET, "key", record.object_id) == record
    assert asked.of_object(BUCKET, "key", record.object_id + 1) is None
    assert asked.owned(BUCKET, "key") is None
    put(store, "key", MISSED)
    assert asked.fresh(settled, "key", NOW) is None
    assert asked.of_version(BUCKET, "key", "v1") is not None, "not fresh, but these are the version's bytes"


def test_the_writer_sees_what_the_readers_do_not_see_yet(bench: Bench) -> None:
    reader = bench.reader()
    info, data = make("key", 100)
    record = bench.store.put_inline(BUCKET, info, data, checked_s=NOW)
    assert bench.store.here(BUCKET, "key").record == record
    assert reader.here(BUCKET, "key").record is None
    bench.store.flush()
    assert reader.here(BUCKET, "key") == bench.store.here(BUCKET, "key")


def test_half_an_object_is_here_in_part(bench: Bench) -> None:
    object_id = land(bench.store, "large", 3 * 64 * 1024, blocks=[0, 2])
    record = bench.reader().of_object(BUCKET, "large", object_id)
    assert record is not None
    assert not record.complete
    assert record.has(0, 10)
    assert not record.has(0, 64 * 1024 + 1)
    assert msgspec.structs.replace(record) == bench.store.here(BUCKET, "large").record
