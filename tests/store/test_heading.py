"""New tags for objects that keep their bytes, and what is left of them after each kind of stop."""

from __future__ import annotations

import msgspec
import pytest

from forebay.core.errors import NotFound
from forebay.core.record import Record, State, headers_of, info_of
from forebay.node.store.disk.notes import Note
from forebay.node.store.writer.writer import Store
from tests.store import owned_objects as owning
from tests.store import store_objects as objects
from tests.store.owned_objects import LARGE, SMALL, Writer
from tests.store.store_objects import BUCKET, Bench


def retag(store: Store, key: str, tags: str, note: Note | None = None) -> None:
    """The three steps, as an engine takes them."""
    record = lookup(store, key)
    tagged = store.headings.plan(BUCKET, info_of(record, key), record, tags, note)
    store.headings.keep(tagged)
    store.headings.show(tagged)
    store.flush()


def lookup(store: Store, key: str) -> Record:
    record = store.lookup(BUCKET, key)
    assert record is not None
    return record


def tags(store: Store, key: str) -> str:
    return dict(headers_of(lookup(store, key))).get("x-amz-tagging", "")


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("state", [State.DIRTY, State.LOCAL])
@pytest.mark.parametrize("durable", [True, False])
def test_an_owned_object_and_its_note_get_new_tags(bench: Bench, size: int, state: State, durable: bool) -> None:
    writer = Writer(bench)
    before = writer.write("k", size, "w1", state=state, durable=durable)
    paths = owning.files_in(bench.dirs[0])
    retag(bench.store, "k", "a=b")
    after = lookup(bench.store, "k")
    assert msgspec.structs.replace(after, head=before.head) == before
    assert tags(bench.store, "k") == "a=b"
    assert owning.files_in(bench.dirs[0]) == paths
    bench.close(clean=False)
    bench.open()
    assert tags(bench.store, "k") == "a=b"
    if state == State.DIRTY:
        assert owning.owed(bench.store)["k"].tags == "a=b"
    assert owning.read(bench, "k") == objects.make("k", size, "w1")[1]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_durable_tags_outlive_the_machine(bench: Bench, size: int) -> None:
    writer = Writer(bench)
    writer.write("k", size, "w1")
    writer.write("l", size, "w1", state=State.LOCAL)
    for key in ("k", "l"):
        retag(bench.store, key, "a=b")
    owning.machine_stop(bench)
    for key in ("k", "l"):
        assert tags(bench.store, key) == "a=b"
        assert owning.read(bench, key) == objects.make(key, size, "w1")[1]
    assert owning.owed(bench.store)["k"].tags == "a=b"


def test_a_clean_object_is_rebuilt_with_its_tags(bench: Bench) -> None:
    objects.land(bench.store, "k", LARGE, "v1")
    bench.store.flush()
    retag(bench.store, "k", "a=b")
    owning.machine_stop(bench)
    assert tags(bench.store, "k") == "a=b"
    retag(bench.store, "k", "")
    owning.machine_stop(bench)
    assert tags(bench.store, "k") == ""


def test_what_was_replaced_meanwhile_gets_none(bench: Bench) -> None:
    writer = Writer(bench)
    old = writer.write("k", LARGE, "w1")
    writer.write("k", LARGE, "w2")
    with pytest.raises(NotFound):
        bench.store.headings.plan(BUCKET, info_of(old, "k"), old, "a=b", None)


def test_a_note_given_with_the_tags_is_what_is_owed(bench: Bench) -> None:
    writer = Writer(bench)
    writer.write("k", LARGE, "w1")
    note = owning.owed(bench.store)["k"]
    retag(bench.store, "k", "a=b", msgspec.structs.replace(note, seq=note.seq + 10, tags="a=b", tried=("x",)))
    assert owning.owed(bench.store)["k"].tried == ("x",)
    bench.close(clean=False)
    bench.open()
    assert owning.owed(bench.store)["k"].seq == note.seq + 10
