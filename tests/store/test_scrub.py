"""Scrub and verify: flipped bytes are found before a client meets them."""

from __future__ import annotations

import os
from pathlib import Path

from forebay.node.store.writer.scrub import IDLE_S, Scrubber
from tests.store import store_objects as objects
from tests.store.store_objects import Bench

KIB = 1024


def _flip(bench: Bench, object_id: int, offset: int) -> None:
    path = next(path for path in (bench.dirs[0] / "data").rglob(f"{object_id:016x}"))
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 0x10]), offset)


def _round(scrubber: Scrubber, start_s: float = 0.0) -> int:
    """Step until the round is over; how many steps."""
    now_s, steps, rounds = start_s, 0, scrubber.rounds()
    while scrubber.rounds() == rounds:
        now_s += scrubber.step(now_s)
        steps += 1
        assert steps < 1000
    return steps


def test_a_flipped_bit_costs_its_block_and_nothing_else(bench: Bench) -> None:
    ids = [objects.land(bench.store, f"k{number}", 250 * KIB) for number in range(4)]
    bench.store.put_inline(objects.BUCKET, *objects.make("small", 700), checked_s=1.0)
    bench.store.flush()
    _flip(bench, ids[2], 70_000)
    scrubber = Scrubber(bench.store)
    _round(scrubber)
    assert (scrubber.units_checked, scrubber.bytes_checked, scrubber.units_bad) == (17, 4 * 250 * KIB + 700, 1)
    assert bench.kinds() == ["block-bad"]
    assert "corpus/k2" in bench.events[0].detail
    bench.store.flush()
    record = bench.store.lookup(objects.BUCKET, "k2")
    assert record is not None
    assert objects.present(record) == [0, 2, 3]
    reader = bench.reader()
    assert objects.read(reader, "k1") is not None
    objects.land(bench.store, "k2", 250 * KIB, blocks=[1])
    assert objects.read(reader, "k2") == objects.make("k2", 250 * KIB)[1]


def test_rotten_inline_bytes_are_found_too(bench: Bench) -> None:
    bench.store.put_inline(objects.BUCKET, *objects.make("small", 700), checked_s=1.0)
    bench.store.close()
    path = bench.dirs[0] / "index" / "1" / "data.mdb"
    data, good = path.read_bytes(), objects.make("small", 700)[1]
    assert good in data
    path.write_bytes(data.replace(good, good[:300] + b"\x00" + good[301:]))
    bench.open()
    scrubber = Scrubber(bench.store)
    _round(scrubber)
    assert scrubber.units_bad == 1
    assert bench.store.lookup(objects.BUCKET, "small") is None


def test_the_rate_is_kept_and_an_empty_store_costs_nothing(bench: Bench) -> None:
    scrubber = Scrubber(bench.store, rate_bytes_s=1e6)
    assert scrubber.step(0.0) == IDLE_S
    for number in range(5):
        objects.land(bench.store, f"k{number}", 256 * KIB)
    now_s, start_s = 10_000_000.0, 10_000_000.0
    for _ in range(40):
        wait_s = scrubber.step(now_s)
        if wait_s == IDLE_S:
            break
        now_s += wait_s
    assert scrubber.units_checked == 20
    assert scrubber.bytes_checked / (now_s - start_s) <= 1e6 * 1.06
    assert scrubber.step(now_s) == IDLE_S, "a round a while, not round and round"
    assert scrubber.step(now_s + 7 * 3600) < IDLE_S


def test_a_scrub_goes_on_where_it_was(bench: Bench) -> None:
    for number in range(10):
        objects.land(bench.store, f"k{number}", 130 * KIB)
    scrubber = Scrubber(bench.store)
    for step in range(14):
        scrubber.step(step * 10.0)
    scrubber.keep()
    bench.close()
    bench.open()
    scrubber = Scrubber(bench.store)
    unit = scrubber.next_unit(0.0)
    assert unit is not None
    assert (unit.key, unit.block) == ("k4", 2)


def test_a_scrub_clears_doubt(bench: Bench) -> None:
    objects.land(bench.store, "k", 250 * KIB)
    bench.close(clean=False)
    mark = bench.dirs[0] / "volume.json"
    mark.write_text(mark.read_text().replace('"boot_id": "', '"boot_id": "x'))
    bench.open()
    assert bench.kinds() == ["index-rebuilt"]
    _round(Scrubber(bench.store))
    record = bench.store.lookup(objects.BUCKET, "k")
    assert record is not None
    assert (record.state, record.complete) == (0, True)


def test_what_is_dropped_while_it_is_read_is_not_called_bad(bench: Bench) -> None:
    object_id = objects.land(bench.store, "k", 250 * KIB)
    scrubber = Scrubber(bench.store)
    unit = scrubber.next_unit(0.0)
    assert unit is not None
    bench.store.drop_units([(object_id, unit.block)])
    bench.store.flush()
    bench.store.reclaim()
    bad = bench.store.check_blocks(unit.record, unit.bucket, unit.key, [unit.block])
    assert bad == [unit.block]
    scrubber.settle(unit, bad)
    assert (scrubber.units_bad, bench.kinds()) == (0, [])


def test_a_file_cut_short_or_gone_is_bad(bench: Bench) -> None:
    object_id = objects.land(bench.store, "k", 250 * KIB)
    record = bench.store.lookup(objects.BUCKET, "k")
    assert record is not None
    path: Path = next((bench.dirs[0] / "data").rglob(f"{object_id:016x}"))
    os.truncate(path, 100 * KIB)
    assert bench.store.check_blocks(record, objects.BUCKET, "k", range(4)) == [1, 2, 3]
    path.unlink()
    assert bench.store.check_blocks(record, objects.BUCKET, "k", range(4)) == [0, 1, 2, 3]
