"""Shards over HTTP: members of tars and zips, plain and packed, warm and cold; and appending to them."""

from __future__ import annotations

import gzip
import http.client
import io
import json
import random
import socket
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import zstandard

from forebay.core.errors import Corrupt
from forebay.core.formats import members
from forebay.core.messages.batch import FRAME, BatchCall, Item
from forebay.core.messages.calls import JobCall
from forebay.node.front.objects.decompression import unpack
from tests.core.archives import files_of, tar_of, zip_of
from tests.front.shard_place import Place, place, until

MIB = 1 << 20
SAMPLES = [
    (f"train/{number:04}.{kind}", random.Random(number).randbytes(37 * number))
    for number in range(60)
    for kind in ("jpg", "cls")
]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path) as made:
        yield made


def packed(form: str) -> bytes:
    plain = tar_of(SAMPLES)
    return {
        "x.tar": lambda: plain,
        "x.tgz": lambda: gzip.compress(plain[:70_000]) + gzip.compress(plain[70_000:]) + bytes(512),
        "x.tar.zst": lambda: zstandard.compress(plain[:70_000]) + zstandard.compress(plain[70_000:]),
        "stored.zip": lambda: zip_of(SAMPLES, zipfile.ZIP_STORED),
        "deflated.zip": lambda: zip_of(SAMPLES, zipfile.ZIP_DEFLATED),
        "nothing in the name": lambda: gzip.compress(plain),
    }[form]()


FORMS = ["x.tar", "x.tgz", "x.tar.zst", "stored.zip", "deflated.zip", "nothing in the name"]


@pytest.mark.parametrize("form", FORMS)
def test_every_member_of_every_kind_of_shard_is_read_whole_and_in_ranges(here: Place, form: str) -> None:
    data = packed(form)
    here.remote.place(form, data)
    for name, wanted in SAMPLES[::7]:
        got = here.get("remote", form, name)
        assert (got.status, got.body) == (200, wanted), name
        assert got.headers["content-type"] == "application/octet-stream"
        assert got.headers["accept-ranges"] == "bytes"
        if len(wanted) > 100:
            part = here.get("remote", form, name, headers={"Range": "bytes=17-80"})
            assert (part.status, part.body) == (206, wanted[17:81])
            assert part.headers["content-range"] == f"bytes 17-80/{len(wanted)}"
            assert here.get("remote", form, name, headers={"Range": "bytes=-5"}).body == wanted[-5:]
    head = here.get("remote", form, SAMPLES[-1][0], method="HEAD")
    assert (head.status, head.headers["content-length"], head.body) == (200, str(len(SAMPLES[-1][1])), b"")
    assert here.builds() == 1
    assert here.get("remote", form).body == data, "the shard itself is an object as before"
    again = here.members("remote", form)
    index = members.decode(again.body)
    assert index.names == [name for name, _ in SAMPLES]
    assert index.sizes() == [len(data) for _, data in SAMPLES]
    assert here.temp_files() == []


def test_what_is_not_there_says_so(here: Place) -> None:
    here.remote.place("x.tar", tar_of(SAMPLES))
    assert here.get("remote", "x.tar", "nothing").error == ("NotFound", "NoSuchMember")
    assert here.get("remote", "x.tar", "").error == ("NotFound", "NoSuchMember")
    assert here.get("remote", "y.tar", "nothing").error == ("NotFound", "NoSuchKey")
    assert here.get("nowhere", "y.tar", "nothing").error == ("NotFound", "NoSuchBucket")
    assert here.get("-members", "remote/=x.tar").error == ("Invalid", "InvalidBucketName")
    for target in ("/-members/remote/=x.tar", "/-members?list-type=2", "/-plain", "/-/v1/list/-members"):
        refused = here.ask("GET", target)
        assert (refused.status, b"InvalidBucketName" in refused.body) == (400, True), target
    assert here.members("remote", "y.tar").error == ("NotFound", "NoSuchKey")
    outside = here.get("remote", "x.tar", SAMPLES[2][0], headers={"Range": "bytes=99999-"})
    assert (outside.status, outside.headers["content-range"]) == (416, f"bytes */{len(SAMPLES[2][1])}")


def test_conditions_are_judged_against_the_shard(here: Place) -> None:
    here.remote.place("x.tar", tar_of(SAMPLES))
    got = here.get("remote", "x.tar", SAMPLES[9][0])
    etag = got.headers["etag"]
    assert here.get("remote", "x.tar", method="HEAD").headers["etag"] == etag
    for asked in (
        lambda **more: here.get("remote", "x.tar", SAMPLES[9][0], **more),
        lambda **more: here.members("remote", "x.tar", **more),
    ):
        assert asked(headers={"If-None-Match": etag}).status == 304
        assert asked(headers={"If-Match": '"other"'}).status == 412
        assert asked(headers={"If-Match": etag}).status == 200


def test_pages_of_json(here: Place) -> None:
    here.remote.place("x.tar", tar_of(SAMPLES))
    first, shown = 0, []
    while first is not None:
        page = json.loads(here.ask("GET", f"/-/v1/members/remote/x.tar?format=json&first={first}&limit=50").body)
        assert (page["count"], page["kind"], page["plain"]) == (len(SAMPLES), "tar", False)
        shown += page["members"]
        first = page["next"]
    assert shown == [[name, len(data)] for name, data in SAMPLES]
    by_accept = here.members("remote", "x.tar", headers={"Accept": "application/json"})
    assert json.loads(by_accept.body)["members"] == shown
    for wrong in ("format=xml", "format=json&limit=0", "format=json&first=x", "format=json&limit=99999"):
        assert here.ask("GET", f"/-/v1/members/remote/x.tar?{wrong}").status == 400


# --- damage ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["x.tar", "x.tgz", "x.tar.zst", "deflated.zip"])
def test_a_shard_that_was_cut_is_corrupt_and_that_is_remembered(here: Place, form: str) -> None:
    here.remote.place(form, packed(form)[:-40_000])
    first = here.get("remote", form, SAMPLES[5][0])
    assert first.error[0] == "Corrupt"
    assert here.get("remote", form, SAMPLES[5][0]).error[0] == "Corrupt"
    assert here.builds() == 1
    here.remote.place(form, packed(form))
    here.run(here.engine.jobs.start("evict", JobCall("remote", keys=[form])))
    here.clock.ahead_s += 120
    assert here.get("remote", form, SAMPLES[5][0]).body == SAMPLES[5][1], "the new version is another shard"
    assert here.temp_files() == []


@pytest.mark.parametrize("key", ["large.tar", "large.tar.gz", "large.tar.zst", "large"])
def test_what_is_no_shard_is_not_fetched_whole_to_find_that_out(here: Place, key: str) -> None:
    here.remote.place(key, random.Random(1).randbytes(64 * MIB))
    here.here(lambda: setattr(here.remote, "free_bytes", 20 * MIB))
    here.here(here.remote.open.clear)  # more than the first bytes never comes
    assert here.get("remote", key, "a").error[0] == "Corrupt"
    here.here(here.remote.open.set)


def test_a_member_whose_checksum_is_wrong_is_never_given_out_whole(here: Place) -> None:
    raw = bytearray(zip_of([("a", b"a" * 100_000), ("b", b"b" * 9)], zipfile.ZIP_DEFLATED))
    entry = raw.index(b"PK\1\2")
    raw[entry + 16] ^= 0xFF
    here.remote.place("x.zip", bytes(raw))
    got = here.get("remote", "x.zip", "a")
    assert got.error[0] == "Corrupt"
    assert here.get("remote", "x.zip", "b").body == b"b" * 9


def test_a_bomb_is_refused() -> None:
    def bomb(packing: str) -> Iterator[bytes]:
        data = gzip.compress(bytes(64 * MIB)) if packing == "gzip" else zstandard.compress(bytes(64 * MIB))
        yield data

    for packing in ("gzip", "zstd"):
        largest = total = 0
        for piece in unpack(bomb(packing), packing, "it"):
            largest, total = max(largest, len(piece)), total + len(piece)
        assert (total, largest) == (64 * MIB, MIB), "it comes in pieces, however it was packed"
        with pytest.raises(Corrupt):
            list(unpack(iter([b"no such thing at all"]), packing, "it"))


# --- where things come from ------------------------------------------------------------------------------------------
def test_the_index_is_kept_with_the_version_and_found_by_the_other_fronts(tmp_path: Path) -> None:
    with place(tmp_path, fronts=2) as here:
        here.remote.place("x.tar", tar_of(SAMPLES))
        assert here.get("remote", "x.tar", SAMPLES[9][0]).body == SAMPLES[9][1]
        fetched = here.remote.fetched_bytes()
        assert here.get("remote", "x.tar", SAMPLES[9][0], front=1).body == SAMPLES[9][1]
        assert (here.builds(), here.remote.fetched_bytes()) == (1, fetched)
        changed = [(name, data[::-1]) for name, data in SAMPLES]
        here.remote.place("x.tar", tar_of(changed))
        here.clock.ahead_s += 120
        here.run(here.engine.jobs.start("refresh", JobCall("remote", keys=["x.tar"])))
        for front in (0, 1):
            for _ in range(200):
                got = here.get("remote", "x.tar", SAMPLES[9][0], front=front).body
                assert got in (SAMPLES[9][1], changed[9][1])
                if got == changed[9][1]:
                    break
            assert got == changed[9][1]
        assert here.builds() == 2


@pytest.mark.parametrize("form", ["x.tar", "x.tgz"])
def test_many_who_ask_at_once_wait_for_one_build(tmp_path: Path, form: str) -> None:
    with place(tmp_path, fronts=2) as here:
        here.remote.place(form, packed(form))
        here.here(here.remote.open.clear)
        got: list[bytes] = []
        asking = [
            threading.Thread(target=lambda n=n: got.append(here.get("remote", form, SAMPLES[n][0], front=n % 2).body))  # type: ignore[misc]
            for n in range(20)
        ]
        for each in asking:
            each.start()
        here.here(here.remote.open.set)
        for each in asking:
            each.join(90)
        assert sorted(got) == sorted(SAMPLES[n][1] for n in range(20))
        assert here.builds() == 1
        assert here.remote.fetched_bytes() <= len(packed(form)) + 2 * 512


def test_what_was_evicted_is_made_again(here: Place) -> None:
    for form in ("x.tar", "x.tgz"):
        here.remote.place(form, packed(form))
        assert here.get("remote", form, SAMPLES[9][0]).body == SAMPLES[9][1]
    state = here.run(here.engine.verbs.answer("status", None))
    assert state.derived_bytes > len(tar_of(SAMPLES))
    here.run(here.engine.work.evict_bucket("remote"))
    assert here.run(here.engine.verbs.answer("status", None)).derived_bytes == 0
    for form in ("x.tar", "x.tgz"):
        assert here.get("remote", form, SAMPLES[11][0]).body == SAMPLES[11][1], "the front still had the index"
    here.forget_indexes()
    for form in ("x.tar", "x.tgz"):
        assert here.get("remote", form, SAMPLES[12][0]).body == SAMPLES[12][1]


@pytest.mark.parametrize("bucket", ["local", "back", "remote"])
def test_what_was_derived_goes_when_its_shard_is_overwritten_or_deleted(here: Place, bucket: str) -> None:
    def derived() -> int:
        state = here.run(here.engine.verbs.answer("status", None))
        return int(state.derived_bytes)

    for key in ("x.tar", "x.tgz"):
        assert here.put(bucket, key, packed(key)).status == 200
        assert here.get(bucket, key, SAMPLES[9][0]).status == 200
    assert derived() > len(tar_of(SAMPLES))
    assert here.put(bucket, "x.tgz", packed("x.tar.zst")).status == 200
    assert 0 < derived() < len(tar_of(SAMPLES))
    assert here.ask("DELETE", f"/-/v1/objects/{bucket}/x.tar").status == 200
    assert derived() == 0


def test_without_room_members_are_read_as_they_pass_and_packed_ones_are_refused(tmp_path: Path) -> None:
    big = [(f"{number}", random.Random(number).randbytes(3 * MIB)) for number in range(8)]
    with place(tmp_path, capacity_bytes=8 * MIB) as here:
        here.remote.place("x.tar", tar_of(big))
        here.remote.place("x.tar.gz", gzip.compress(tar_of(big), 1))
        for name, data in (big[7], big[0], big[4]):
            assert here.get("remote", "x.tar", name).body == data
        refused = here.get("remote", "x.tar.gz", "3")
        assert (refused.status, refused.error) == (507, ("Unavailable", "InsufficientStorage"))
        asked = here.remote.fetched_bytes()
        assert here.get("remote", "x.tar.gz", "4").status == 507
        assert here.remote.fetched_bytes() == asked, "it is not tried for each who asks"
        assert here.temp_files() == []


# --- in batches ------------------------------------------------------------------------------------------------------
def frames(body: bytes) -> list[tuple[int, int, int, bytes]]:
    """Status, flags, size of the whole and bytes of each item of a batch's answer."""
    found, at = [], 0
    while at < len(body):
        status, flags, zero, size, total = FRAME.unpack_from(body, at)
        assert zero == 0
        at += FRAME.size
        found.append((status, flags, total, body[at : at + size]))
        assert len(found[-1][3]) == size, "cut"
        at += size
    return found


def batch(here: Place, items: list[Item], form: str = "frames") -> bytes:
    body = msgspec.json.encode(BatchCall(items, form))  # type: ignore[arg-type]
    answer = here.ask("POST", "/-/v1/batch", body, {"Content-Type": "application/json"})
    assert answer.status == 200, answer.body
    return answer.body


@pytest.mark.parametrize("warm", [False, True])
def test_members_in_a_batch_from_every_kind_of_shard_in_order(here: Place, warm: bool) -> None:
    for form in FORMS:
        here.remote.place(form, packed(form))
        if warm:
            assert here.get("remote", form, SAMPLES[0][0]).status == 200
    chosen = random.Random(4).choices(range(len(SAMPLES)), k=120)
    items = [Item("remote", FORMS[n % len(FORMS)], member=SAMPLES[at][0]) for n, at in enumerate(chosen)]
    wanted = [SAMPLES[at][1] for at in chosen]
    answers = frames(batch(here, items))
    assert [(status, total, data) for status, _, total, data in answers] == [(200, len(data), data) for data in wanted]
    parts = [Item("remote", form, 3, 20, "train/0040.jpg") for form in FORMS]
    sample = dict(SAMPLES)["train/0040.jpg"]
    assert [answer[2:] for answer in frames(batch(here, parts))] == [(len(sample), sample[3:20])] * len(FORMS)
    with tarfile.open(fileobj=io.BytesIO(batch(here, items[:12], "tar"))) as archive:
        assert [archive.extractfile(info).read() for info in archive] == wanted[:12]  # type: ignore[union-attr]
    assert here.builds() == len(FORMS)


def test_what_is_wrong_with_a_member_stands_in_its_place(here: Place) -> None:
    here.remote.place("x.tar", packed("x.tar"))
    here.remote.place("cut.tar", packed("x.tar")[:-40_000])
    name, data = SAMPLES[9]
    etag = here.get("remote", "x.tar", name).headers["etag"].strip('"')
    items = [
        Item("remote", "x.tar", member=name),
        Item("remote", "x.tar", member="nothing"),
        Item("remote", "cut.tar", member=name),
        Item("remote", "none.tar", member=name),
        Item("nowhere", "x.tar", member=name),
        Item("remote", "x.tar", 10_000, None, name),
        Item("remote", "x.tar", member=name, etag="other"),
        Item("remote", "x.tar", member=name, etag=etag),
        Item("remote", "x.tar", member=SAMPLES[0][0]),
        Item("remote", "x.tar", 0, 1024),
    ]
    answers = frames(batch(here, items))
    assert [answer[0] for answer in answers] == [200, 404, 502, 404, 404, 416, 412, 200, 200, 200]
    codes = [msgspec.msgpack.decode(answer[3])[2] for answer in answers if answer[0] == 404]
    assert codes == ["NoSuchMember", "NoSuchKey", "NoSuchBucket"]
    assert [answers[at][3] for at in (0, 7, 8)] == [data, data, b""]
    assert answers[9][3] == packed("x.tar")[:1024]


# --- appending -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bucket", ["local", "back"])
def test_appended_members_make_the_tar_that_tar_would_make(here: Place, bucket: str) -> None:
    files = [("a/1", b"one"), ("a/2", b""), ("näme", b"x" * 20_000), ("big", random.Random(1).randbytes(5 * MIB + 3))]
    for number, (name, data) in enumerate(files, 1):
        written = here.append(bucket, "new.tar", name, data)
        assert written.status == 200, written.body
        whole = here.get(bucket, "new.tar")
        assert files_of(whole.body) == files[:number]
        assert json.loads(written.body)["etag"] == whole.headers["etag"].strip('"')
        assert here.get(bucket, "new.tar", name).body == data
    assert here.builds() == 0, "the index grew with the shard"
    assert here.temp_files() == []
    if bucket == "back":
        here.run(here.engine.flusher.flush("back"))
        assert files_of(here.get("remote", "new.tar").body) == files, "as the backend has it"
        assert here.get(bucket, "new.tar", "big").body == files[-1][1]


def test_appending_to_a_tar_of_another_maker_and_to_one_that_is_cold(here: Place) -> None:
    here.remote.place("x.tar", tar_of(SAMPLES))
    assert here.append("back", "x.tar", "one more", b"data").status == 200
    assert files_of(here.get("back", "x.tar").body) == [*SAMPLES, ("one more", b"data")]
    unfilled = tar_of([("a", b"abc")])[:515]
    assert here.put("local", "short.tar", unfilled).status == 200
    assert here.append("local", "short.tar", "b", b"B").status == 200
    assert files_of(here.get("local", "short.tar").body) == [("a", b"abc"), ("b", b"B")]


def test_conditions_of_an_append(here: Place) -> None:
    made = here.append("local", "x.tar", "a", b"1", headers={"If-None-Match": "*"})
    assert made.status == 200
    assert here.append("local", "x.tar", "b", b"2", headers={"If-None-Match": "*"}).status == 412
    assert here.append("local", "x.tar", "b", b"2", headers={"If-Match": '"other"'}).status == 412
    etag = json.loads(made.body)["etag"]
    assert here.append("local", "x.tar", "b", b"2", headers={"If-Match": f'"{etag}"'}).status == 200
    assert here.append("local", "x.tar", "c", b"3", headers={"If-Match": f'"{etag}"'}).status == 412
    assert here.append("local", "y.tar", "c", b"3", headers={"If-Match": f'"{etag}"'}).status == 404
    assert files_of(here.get("local", "x.tar").body) == [("a", b"1"), ("b", b"2")]


def test_what_cannot_be_appended_to_is_left_as_it_is(here: Place) -> None:
    assert here.append("remote", "x.tar", "a", b"1").error[0] == "NotSupported"
    for key in ("x.zip", "x.tar.gz", "x.tgz"):
        assert here.append("local", key, "a", b"1").error[0] == "NotSupported"
    assert here.append("local", "x.tar", "", b"1").status == 400
    assert here.put("local", "no.tar", b"this is no tar at all" * 100).status == 200
    assert here.append("local", "no.tar", "a", b"1").error[0] == "Corrupt"
    assert here.get("local", "no.tar").body == b"this is no tar at all" * 100
    assert here.temp_files() == []


def test_appends_at_once_all_arrive_and_none_is_doubled(tmp_path: Path) -> None:
    with place(tmp_path, fronts=2) as here:
        statuses: list[int] = []
        files = {f"m{number}": random.Random(number).randbytes(number * 3_000) for number in range(16)}

        def append(number: int) -> None:
            name = f"m{number}"
            statuses.append(here.append("local", "x.tar", name, files[name], front=number % 2).status)

        asking = [threading.Thread(target=append, args=(number,)) for number in range(16)]
        for each in asking:
            each.start()
        for each in asking:
            each.join(90)
        assert statuses == [200] * 16
        found = files_of(here.get("local", "x.tar").body)
        assert len(found) == 16
        assert dict(found) == files
        for name, data in files.items():
            assert here.get("local", "x.tar", name, front=1).body == data
        assert here.temp_files() == []


def test_a_body_that_ends_early_appends_nothing(here: Place) -> None:
    here.append("local", "x.tar", "a", b"1")
    with socket.create_connection(("127.0.0.1", here.fronts[0].port), timeout=90) as made:
        made.sendall(b"POST /-/v1/members/local/x.tar?name=b HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\nhalf")
    until(lambda: here.temp_files() == [])
    assert files_of(here.get("local", "x.tar").body) == [("a", b"1")]


def test_a_front_that_stops_while_it_builds_leaves_nothing(tmp_path: Path) -> None:
    with place(tmp_path, fronts=2) as here:
        here.remote.place("x.tgz", packed("x.tgz"))
        here.here(here.remote.open.clear)

        def ask() -> None:
            with suppress(OSError, http.client.HTTPException):  # the front goes
                here.get("remote", "x.tgz", SAMPLES[3][0], front=1)

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: here.shards(1)._building)
        here.run(here.fronts[1].stop(0.1))
        here.here(here.remote.open.set)
        asking.join(90)
        assert here.get("remote", "x.tgz", SAMPLES[3][0]).body == SAMPLES[3][1], "who comes after builds it"
        assert here.temp_files() == []
