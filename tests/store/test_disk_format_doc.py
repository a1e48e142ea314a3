"""docs/disk-format.md is right: its examples run against a volume that a store wrote; its numbers are the code's."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import xxhash

from forebay.core import limits
from forebay.core.record import Record, State
from forebay.core.types import ObjectInfo
from forebay.node.store.disk import durable, files, journal, ledger, volume
from forebay.node.store.disk.notes import Note
from forebay.node.store.writer.puts import Put
from forebay.node.store.writer.writer import Store
from tests.store import store_objects as objects

DOC = Path(__file__).parents[2] / "docs" / "disk-format.md"


def _write_example(path: Path) -> None:
    store = Store.open([path])
    hello = ObjectInfo("notes/readme.txt", 11, "v1", "etag-v1", 1_700_000_000.0)
    store.put_inline(objects.BUCKET, hello, b"hello world", checked_s=1.0)
    info, data = objects.make("train/shard-000.tar", 10 * limits.MIB)
    landing = store.begin(objects.BUCKET, info, checked_s=1.0)
    for block in (0, 1, 2):
        objects.land_block(landing, data, block)
    landing.close()
    store.drop_units([(landing.object_id, 1)])
    store.put_inline(objects.BUCKET, *objects.make("x" * 600, 20), checked_s=1.0)
    result = ObjectInfo("z/run-1.csv", 8, "w1", "etag-w1", 1_700_000_000.0)
    note = Note(1, 1.0, 8, store.take_id(), "")
    change = Put(objects.BUCKET, result, note.object_id, State.DIRTY, 1.0, body=b"a,b\n1,2\n", note=note, durable=True)
    prepared = store.prepare([change])
    store.make_durable(prepared)
    store.publish(prepared)
    store.reclaim()
    store.close()


def test_the_examples_are_true(tmp_path: Path) -> None:
    _write_example(tmp_path / "v0")
    text = DOC.read_text()
    source = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    test = doctest.DocTestParser().get_doctest(source, {"volume": tmp_path / "v0"}, "disk-format", str(DOC), 0)
    assert len(test.examples) > 30
    complaints: list[str] = []
    failed, tried = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF).run(test, out=complaints.append)
    assert failed == 0, "".join(complaints)
    assert tried == len(test.examples)


def test_the_tables_name_every_field_and_number() -> None:
    text = DOC.read_text()
    rows = re.findall(r"^\| (\d+) \| ([a-z]\w+) \|", text, flags=re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == list(enumerate(Record.__struct_fields__))
    for name in volume.Mark.__struct_fields__:
        assert f"`{name}`" in text
    identity = re.search(r"msgpack array of (object_id.*?) \|", text)
    assert identity is not None
    assert [re.sub(r" \(.*", "", name) for name in re.split(r", (?![^(]*\))", identity[1])] == list(
        files.Identity.__struct_fields__
    )
    flat = " ".join(text.split())  # a fact may go over the end of a line
    for fact in (
        f"Format: **{volume.FORMAT}**",
        files.XATTR,
        files.MAGIC.decode(),
        f"at most {limits.FILE_HEADER_BYTES_MAX:,} bytes",
        f"at most {limits.INLINE_BYTES_MAX:,})",
        f"blocks {ledger.GROUP_BLOCKS} x group",
        f"| key | {limits.KEY_BYTES_MAX:,} bytes",
        f"| volumes of a node | {limits.VOLUMES_MAX} |",
        f"{limits.INDEX_READERS_MAX:,} readers; map of {limits.INDEX_MAP_BYTES // limits.GIB} GiB",
        f"min of {limits.RESERVE_BYTES_MAX // limits.MIB} MiB and 1 %",
        f"{limits.BLOCK_BYTES:,} unless",
        journal.MAGIC.decode(),
        f"multiple of {journal.ALIGN_BYTES:,} bytes",
        f"pass {journal.GENERATION_BYTES // limits.MIB} MiB",
        f"less room than {journal.ROOM_TIMES} times",
    ):
        assert fact in flat, fact


def test_the_hash_functions_are_those_the_page_names() -> None:
    """Published values of xxHash (XXH3, empty input, seed 0): another implementation can be checked by them."""
    assert xxhash.xxh3_64_hexdigest(b"") == "2d06800538d394c2"
    assert xxhash.xxh3_128_digest(b"").hex() == "99aa06d3014798d86001c324468d497f"


def test_the_note_and_the_entry_are_named_field_by_field() -> None:
    text = re.sub(r"\s+", " ", DOC.read_text())
    note = re.search(r"The note is a msgpack array: (.*?)\. ", text)
    assert note is not None
    plain = re.sub(r" \([^)]*\)", "", note[1])
    assert plain.split(", ") == list(Note.__struct_fields__)
    entry = re.search(r"msgpack `Entry`: (note.*?) \|", text)
    assert entry is not None
    assert len(re.split(r", (?![^(]*\))", entry[1])) == len(durable.Entry.__struct_fields__)
    assert f"map of {limits.DURABLE_MAP_BYTES // limits.GIB} GiB, growing" in text
