"""A disk that does not answer, as the store sees it: nobody waits for it, and nothing that was decided is lost."""

from __future__ import annotations

import builtins
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from forebay.core.errors import Unavailable
from forebay.core.machines.stall import LOOK_S, STALLED_AFTER_S
from forebay.node.store.disk import volume_threads
from tests.patience import until
from tests.store import owned_objects as owning
from tests.store import store_objects as objects
from tests.store.owned_objects import LARGE, SMALL, Writer
from tests.store.store_objects import BUCKET, Bench


@contextmanager
def silent(bench: Bench) -> Iterator[None]:
    """The volume's hand stands still, and everybody has noticed. It goes on at the end."""
    (volume,), answers = bench.store.usable(), threading.Event()
    bench.store.serve()
    volume.desk.patience_s = 0.0
    volume.desk.begin(answers.wait)
    with pytest.raises(volume_threads.Late):
        volume.desk.call(os.getpid)
    until(lambda: volume.desk.oldest() is not None)
    volume.desk.patience_s = volume_threads.CALL_S
    try:
        yield
    finally:
        answers.set()


def watched(bench: Bench) -> bool:
    """Whether the volume is stalled after as many looks as it may take, and one for its beginning."""
    for look in range(int(STALLED_AFTER_S / LOOK_S) + 2):
        bench.store.watch(1000.0 + look * LOOK_S)
    return bench.store.any_stalled


def test_what_was_decided_is_seen_at_once_and_committed_when_the_disk_answers(bench: Bench) -> None:
    objects.land(bench.store, "old", LARGE)
    answered = threading.Event()
    bench.store.on_answer = answered.set
    (volume,) = bench.store.usable()
    with silent(bench):
        bench.store.forget(BUCKET, "old")
        bench.store.flush()
        bench.store.set_pinned(BUCKET, "old", True)
        assert bench.store.flush() == 0, "what came since waits for what is under way"
        assert bench.store.lookup(BUCKET, "old") is None
        assert bench.reader().lookup(BUCKET, "old") is not None, "not committed"
        assert bench.store.take_dropped() == []
    assert answered.wait(90)
    bench.store.flush()
    assert bench.reader().lookup(BUCKET, "old") is None
    assert len(bench.store.take_dropped()) == 1
    assert volume.usage.objects == 0
    bench.store.reclaim()
    assert owning.files_in(bench.dirs[0]) == []


def test_a_write_is_told_to_be_done_when_it_is_in_view(bench: Bench) -> None:
    writer = Writer(bench)
    prepared = bench.store.prepare([writer.put("k", SMALL, durable=False)])
    with silent(bench):
        bench.store.make_durable(prepared)
        assert bench.store.publish(prepared) is None
        bench.store.flush()
        assert bench.store.outcomes(prepared) is None
        assert bench.store.lookup(BUCKET, "k") is not None

    def done() -> object:
        bench.store.flush()
        return bench.store.outcomes(prepared)

    (record,) = until(done)
    assert record == bench.reader().lookup(BUCKET, "k")


def test_a_stalled_volume_takes_nothing_and_gives_what_it_owns_to_nobody(bench: Bench) -> None:
    writer = Writer(bench)
    writer.write("owned", SMALL)
    objects.land(bench.store, "cached", LARGE)
    with silent(bench):
        assert watched(bench)
        assert [at.stalled for at in bench.store.volumes()] == [True]
        assert bench.store.usage()[0].state == "stalled"
        with pytest.raises(Unavailable, match="does not answer"):
            bench.store.check_present(BUCKET, "owned")
        bench.store.check_present(BUCKET, "cached")
        with pytest.raises(Unavailable, match="does not answer"):
            bench.store.check_answers(BUCKET, "cached")
        bench.store.check_answers(BUCKET, "never")
        with pytest.raises(Unavailable, match="does not answer"):
            bench.store.begin(BUCKET, objects.make("new", LARGE)[0], checked_s=1.0)
        (refused,) = bench.store.prepare([writer.put("new", SMALL)]).outcomes
        assert refused is not None
        assert refused.retry_after_s is not None
        reader = bench.reader()
        reader.refresh(bench.store.volumes())
        assert reader.lookup(BUCKET, "cached") is None, "the engine may know better"
        assert [key for key, _ in reader.scan(BUCKET)] == ["cached", "owned"]
        with pytest.raises(Unavailable, match="does not answer"):
            reader.incoming(BUCKET, "new")
    (volume,) = bench.store.usable()
    until(lambda: volume.desk.oldest() is None and not volume.desk.late)
    assert not watched(bench)
    bench.store.check_present(BUCKET, "owned")
    writer.write("owned", SMALL, "w2")
    reader = bench.reader()
    reader.refresh(bench.store.volumes())
    assert reader.lookup(BUCKET, "cached") is not None


def test_a_file_that_was_made_too_late_goes_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.store.serve()
    (volume,), may = bench.store.usable(), threading.Event()
    volume.desk.patience_s = 0.0
    volume.desk.begin(may.wait)
    monkeypatch.setattr(volume_threads.Desk, "late", False)  # nobody has noticed yet
    with pytest.raises(Unavailable):
        bench.store.begin(BUCKET, objects.make("k", LARGE)[0], checked_s=1.0)
    assert volume.state == "ok"
    may.set()
    until(lambda: owning.files_in(bench.dirs[0]) == [])


# --- the store's thread changes nothing itself -----------------------------------------------------------------------
CHANGING = ["unlink", "remove", "rename", "replace", "truncate", "mkdir", "rmdir", "link"]


@contextmanager
def changed_here(bench: Bench) -> Iterator[list[str]]:
    """What the calling thread itself changes in the volume's directory. A disk may stop at each of these. (No audit
    hook: that stays for the whole process, and torch's compiler takes notice of it in other tests.)"""
    directory, thread, changes = str(bench.dirs[0]), threading.get_ident(), list[str]()

    def noting(name: str, real: Callable[..., Any], is_change: Callable[..., bool]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **named: Any) -> Any:
            if threading.get_ident() == thread and str(path).startswith(directory) and is_change(*arguments, **named):
                changes.append(f"{name} {path}")
            return real(path, *arguments, **named)

        return call

    with ExitStack() as patches:
        for name in CHANGING:
            patches.enter_context(mock.patch.object(os, name, noting(name, getattr(os, name), lambda *_, **__: True)))
        by_flags = noting("open", os.open, lambda flags, *_, **__: bool(flags & os.O_ACCMODE))
        by_mode = noting("open", open, lambda mode="r", *_, **__: bool(set(mode) & set("wxa+")))
        patches.enter_context(mock.patch.object(os, "open", by_flags))
        patches.enter_context(mock.patch.object(builtins, "open", by_mode))
        yield changes


def test_a_volume_that_was_full_is_made_ready_by_its_own_thread(bench: Bench) -> None:
    bench.store.serve()
    (volume,) = bench.store.usable()
    ballast = Path(volume.path, "ballast")
    ballast.unlink()
    volume.state = "full"
    with changed_here(bench) as changes:
        bench.store.housekeep()
    assert (volume.state, ballast.exists(), changes) == ("ok", True, [])


def test_a_volume_that_was_full_stays_so_while_its_disk_does_not_answer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.store.serve()
    (volume,) = bench.store.usable()
    answers, make = threading.Event(), volume.make_ballast
    monkeypatch.setattr(volume, "make_ballast", lambda: answers.wait() and make())
    monkeypatch.setattr(volume.desk, "patience_s", 0.0)
    volume.state = "full"
    bench.store.housekeep()
    assert (volume.state, volume.silent) == ("full", True)
    answers.set()
    until(lambda: not volume.silent)
    monkeypatch.setattr(volume.desk, "patience_s", volume_threads.CALL_S)
    bench.store.housekeep()
    assert (volume.state, bench.kinds()) == ("ok", ["volume-healed"])


def test_what_nobody_names_is_swept_by_the_volumes_own_thread(bench: Bench) -> None:
    objects.land(bench.store, "kept", LARGE)
    bench.store.flush()
    (volume,) = bench.store.usable()
    record = bench.store.lookup(BUCKET, "kept")
    assert record is not None
    path = Path(volume.data_path(record.object_id))
    rubbish = [path.with_name(f"{int(path.name, 16) + 1000:016x}"), path.with_name(f"{1234:016x}.head")]
    for each in rubbish:
        each.write_bytes(bytes(1000))
    bench.store.serve()
    with changed_here(bench) as changes:
        list(bench.store.sweep())
    assert [each for each in rubbish if each.exists()] == []
    assert changes == []
    assert bench.store.lookup(BUCKET, "kept") is not None


def test_the_mark_of_a_walk_is_made_by_the_volumes_own_thread(bench: Bench) -> None:
    objects.land(bench.store, "k", LARGE)
    bench.store.flush()
    bench.store.serve()
    (volume,) = bench.store.usable()
    mark = Path(volume.index_path(), "opening")
    with changed_here(bench) as changes:
        for _, units in bench.store.unit_batches():
            assert mark.exists()
            assert {unit.key for unit in units} == {"k"}
    assert (mark.exists(), changes) == (False, [])
