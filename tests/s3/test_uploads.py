"""Multipart uploads over the S3 API: what clients say and what they hear. The engine behind is played, simply."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import zlib
from typing import Any
from xml.etree import ElementTree

import pytest

from forebay.core.access import Identity
from forebay.core.errors import Unavailable
from forebay.core.machines import uploads
from forebay.core.machines.uploads import Part
from forebay.core.messages import calls
from tests.s3.fake_front import MODIFIED_S, Answer, Front, Object

MIB = 1 << 20
BIG = b"b" * (5 * MIB)


class Shelf:
    """The engine's uploads as a dictionary."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.states: dict[str, calls.UploadState] = {}
        self.parts: dict[str, dict[int, tuple[Part, bytes]]] = {}
        self.created: list[calls.UploadCreateCall] = []
        self.fails: Any = None
        for verb in (
            "upload_create",
            "upload_part",
            "upload_part_copy",
            "upload_parts",
            "upload_complete",
            "upload_abort",
            "uploads",
        ):
            front.reads.answers[verb] = getattr(self, verb.removeprefix("upload_"))

    def create(self, call: calls.UploadCreateCall) -> calls.UploadState:
        algorithm, kind = uploads.settle_checksum(call.checksum_algorithm, call.checksum_type)
        upload_id = f"id{len(self.states)}"
        self.created.append(call)
        self.states[upload_id] = calls.UploadState(call.bucket, call.key, upload_id, MODIFIED_S, algorithm, kind)
        self.parts[upload_id] = {}
        return self.states[upload_id]

    def find(self, call: Any) -> calls.UploadState:
        state = self.states.get(call.upload_id)
        if state is None or (state.bucket, state.key) != (call.bucket, call.key):
            raise uploads.no_such_upload(call.upload_id)
        return state

    def part(self, call: calls.UploadPartCall) -> calls.PartState:
        if self.fails is not None:
            raise self.fails
        state, data = self.find(call), call.body
        if data is None:
            with open(call.path, "rb") as file:
                data = file.read()
            os.unlink(call.path)
        assert len(data) == call.size_bytes
        assert hashlib.md5(data).hexdigest() == call.md5
        return self.keep(state, call.number, data, call.checksums)

    def keep(self, state: calls.UploadState, number: int, data: bytes, given: dict[str, str]) -> calls.PartState:
        algorithm, checksum = uploads.pick_checksum(state.checksum_algorithm, given)
        md5 = hashlib.md5(data).hexdigest()
        part = Part(number, 1, len(data), md5, MODIFIED_S, algorithm, checksum)
        self.parts[state.upload_id][number] = (part, data)
        return seen(part)

    def part_copy(self, call: calls.UploadPartCopyCall) -> calls.PartState:
        data = self.front.reads.buckets[call.source_bucket][call.source_key].data
        return self.keep(self.find(call), call.number, data[call.start : call.end], {})

    def complete(self, call: calls.UploadCompleteCall) -> calls.UploadCompleted:
        state = self.find(call)
        parts = {number: part for number, (part, _) in self.parts[state.upload_id].items()}
        chosen = uploads.choose(parts, call.parts, state.checksum_algorithm, state.checksum_type, call.size_bytes)
        value = uploads.checksum_of(state.checksum_algorithm, state.checksum_type, chosen)
        uploads.check_form(call.checksums, state.checksum_algorithm, state.checksum_type)
        uploads.check_promised(call.checksums, value)
        data = b"".join(self.parts[state.upload_id][part.number][1] for part in chosen)
        etag = uploads.etag_of([part.md5 for part in chosen])
        self.front.reads.buckets[call.bucket][call.key] = Object(data, {}, etag)
        del self.states[state.upload_id]
        checksums = {state.checksum_algorithm: value} if value else {}
        written = calls.Written(etag, etag, len(data), MODIFIED_S)
        return calls.UploadCompleted(written, checksums, state.checksum_type)

    def abort(self, call: calls.UploadNamed) -> calls.Nothing:
        del self.states[self.find(call).upload_id]
        return calls.Nothing()

    def uploads(self, call: calls.UploadsCall) -> calls.Uploads:
        names = sorted((state.key, state.upload_id) for state in self.states.values())
        page, more = uploads.page_of(names, call.prefix, call.after_key, call.after_id, min(call.limit, 3))
        return calls.Uploads([self.states[upload_id] for _, upload_id in page], more)  # short pages: one asks again


def _list_parts(shelf: Shelf, call: calls.UploadPartsCall) -> calls.UploadParts:
    state = shelf.find(call)
    numbers = sorted(number for number in shelf.parts[state.upload_id] if number > call.after)
    shown = [seen(shelf.parts[state.upload_id][number][0]) for number in numbers[: call.limit]]
    return calls.UploadParts(state, shown, len(numbers) > call.limit)


def seen(part: Part) -> calls.PartState:
    checksums = {part.algorithm: part.checksum} if part.checksum else {}
    return calls.PartState(part.number, part.size_bytes, part.md5, part.modified_s, checksums)


@pytest.fixture
def front() -> Front:
    return Front(box={"source": Object(b"0123456789")})


@pytest.fixture
def shelf(front: Front) -> Shelf:
    made = Shelf(front)
    front.reads.answers["upload_parts"] = lambda call: _list_parts(made, call)
    return made


def create(front: Front, key: str = "k", **headers: str) -> str:
    answer = front.ask("POST", f"/box/{key}?uploads=", body=b"", **headers)
    assert answer.status == 200, answer.body
    assert answer.xml.tag == "InitiateMultipartUploadResult"
    return answer.xml.findtext("UploadId") or ""


def send(front: Front, upload: str, number: int, data: bytes, key: str = "k", **headers: str) -> Answer:
    return front.put(f"/box/{key}?partNumber={number}&uploadId={upload}", data, **headers)


def asked(*parts: tuple[int, str], **more: str) -> bytes:
    said = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag>"
        + "".join(f"<{name}>{value}</{name}>" for name, value in more.items())
        + "</Part>"
        for number, etag in parts
    )
    root = "CompleteMultipartUpload"
    return f'<{root} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{said}</{root}>'.encode()


def complete(front: Front, upload: str, body: bytes, **headers: str) -> Answer:
    return front.ask("POST", f"/box/k?uploadId={upload}", body=body, **headers)


def crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


# --- the way of an upload --------------------------------------------------------------------------------------------
def test_an_object_is_made_in_parts(front: Front, shelf: Shelf) -> None:
    upload = create(front, content_type="text/x", x_amz_meta_colour="blue", x_amz_tagging="a=b")
    assert shelf.created[0].headers == (("content-type", "text/x"), ("x-amz-meta-colour", "blue"))
    assert shelf.created[0].tags == "a=b"
    one, two = send(front, upload, 1, BIG), send(front, upload, 2, b"end")
    assert (one.status, one.headers["etag"]) == (200, f'"{hashlib.md5(BIG).hexdigest()}"')
    answer = complete(front, upload, asked((1, one.headers["etag"]), (2, two.headers["etag"])))
    assert answer.status == 200
    xml = answer.xml
    assert xml.tag == "CompleteMultipartUploadResult"
    assert (xml.findtext("Bucket"), xml.findtext("Key")) == ("box", "k")
    assert xml.findtext("Location") == "http://127.0.0.1:9400/box/k"
    assert re.fullmatch(r'"[0-9a-f]{32}-2"', xml.findtext("ETag") or "")
    assert front.get("/box/k").body == BIG + b"end"
    assert front.left_over == []


def test_an_aborted_upload_is_gone(front: Front, shelf: Shelf) -> None:
    upload = create(front)
    assert front.ask("DELETE", f"/box/k?uploadId={upload}").status == 204
    answer = front.ask("DELETE", f"/box/k?uploadId={upload}")
    assert (answer.status, answer.code) == (404, "NoSuchUpload")
    answer = send(front, upload, 1, BIG)
    assert (answer.status, answer.code) == (404, "NoSuchUpload")
    assert front.left_over == [], "the body of a part that came too late"


def test_checksums_go_there_and_back(front: Front, shelf: Shelf) -> None:
    upload = create(front, x_amz_checksum_algorithm="CRC32")
    one = send(front, upload, 1, b"data", x_amz_checksum_crc32=crc32(b"data"))
    assert one.headers["x-amz-checksum-crc32"] == crc32(b"data")
    whole = crc32(zlib.crc32(b"data").to_bytes(4, "big"))
    body = asked((1, one.headers["etag"]), ChecksumCRC32=crc32(b"data"))
    assert complete(front, upload, body, x_amz_checksum_crc32="bad").code == "BadDigest"
    assert complete(front, upload, body, x_amz_checksum_crc32=crc32(b"other")).code == "BadDigest"
    missing = asked((1, one.headers["etag"]))
    assert complete(front, upload, missing).code == "InvalidRequest"
    wrong = asked((1, one.headers["etag"]), ChecksumCRC32=crc32(b"other"))
    assert complete(front, upload, wrong).code == "InvalidPart"
    answer = complete(front, upload, body, x_amz_checksum_crc32=whole + "-1")
    assert answer.status == 200, answer.body
    assert answer.xml.findtext("ChecksumCRC32") == whole + "-1"
    assert answer.xml.findtext("ChecksumType") == "COMPOSITE"


def test_create_answers_with_the_checksum_that_the_upload_has(front: Front, shelf: Shelf) -> None:
    answer = front.ask("POST", "/box/k?uploads", body=b"", x_amz_checksum_algorithm="crc64nvme")
    assert answer.headers["x-amz-checksum-algorithm"] == "CRC64NVME"
    assert answer.headers["x-amz-checksum-type"] == "FULL_OBJECT"
    answer = front.ask("POST", "/box/k?uploads", body=b"", x_amz_checksum_type="FULL_OBJECT")
    assert (answer.status, answer.code) == (400, "InvalidRequest")


def test_a_part_with_a_wrong_checksum_leaves_nothing(front: Front, shelf: Shelf) -> None:
    upload = create(front)
    wrong = base64.b64encode(hashlib.md5(b"other").digest()).decode()
    assert send(front, upload, 1, BIG, content_md5=wrong).code == "BadDigest"
    assert send(front, upload, 1, BIG, x_amz_checksum_crc32=crc32(b"other")).code == "BadDigest"
    shelf.fails = Unavailable("no room", code="InsufficientStorage")
    assert send(front, upload, 1, BIG).status == 507
    assert front.left_over == []
    assert shelf.parts[upload] == {}


def test_parts_are_copied_from_objects(front: Front, shelf: Shelf) -> None:
    upload = create(front)
    answer = send(front, upload, 1, b"", x_amz_copy_source="/box/source", x_amz_copy_source_range="bytes=2-5")
    assert answer.status == 200, answer.body
    assert answer.xml.tag == "CopyPartResult"
    assert answer.xml.findtext("ETag") == f'"{hashlib.md5(b"2345").hexdigest()}"'
    assert shelf.parts[upload][1][1] == b"2345"
    for bad in ("bytes=5-2", "bytes=2-", "bytes=-2", "2-5", "bytes=1-2,4-5"):
        answer = send(front, upload, 1, b"", x_amz_copy_source="/box/source", x_amz_copy_source_range=bad)
        assert (answer.status, answer.code) == (400, "InvalidArgument")


# --- bad requests ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", ["0", "10001", "x", "-1", "", "99999999999999999999"])
def test_part_numbers_are_1_to_10000(front: Front, shelf: Shelf, number: str) -> None:
    upload = create(front)
    answer = front.put(f"/box/k?partNumber={number}&uploadId={upload}", b"x")
    assert (answer.status, answer.code) == (400, "InvalidArgument")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<",
        b"<Other/>",
        b"<CompleteMultipartUpload/>",
        b"<CompleteMultipartUpload><Part><PartNumber>x</PartNumber><ETag>e</ETag></Part></CompleteMultipartUpload>",
        b"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber></Part></CompleteMultipartUpload>",
        b"<CompleteMultipartUpload><Other/></CompleteMultipartUpload>",
        b'<!DOCTYPE a [<!ENTITY b "c">]><CompleteMultipartUpload/>',
    ],
)
def test_a_bad_list_of_parts_is_malformed(front: Front, shelf: Shelf, body: bytes) -> None:
    answer = complete(front, create(front), body)
    assert (answer.status, answer.code) == (400, "MalformedXML")


def test_too_many_parts_are_malformed(front: Front, shelf: Shelf) -> None:
    body = asked(*((number, "e") for number in range(1, 10_002)))
    assert complete(front, create(front), body).code == "MalformedXML"


def test_order_sizes_and_tags_are_judged(front: Front, shelf: Shelf) -> None:
    upload = create(front)
    small, last = send(front, upload, 1, b"small").headers["etag"], send(front, upload, 2, b"last").headers["etag"]
    assert complete(front, upload, asked((1, small), (2, last))).code == "EntityTooSmall"
    assert complete(front, upload, asked((2, last), (1, small))).code == "InvalidPartOrder"
    assert complete(front, upload, asked((1, last))).code == "InvalidPart"
    assert complete(front, upload, asked((1, ""))).code == "InvalidPart"
    assert complete(front, upload, asked((1, small)), x_amz_mp_object_size="4").code == "InvalidRequest"
    assert complete(front, upload, asked((1, small)), x_amz_mp_object_size="x").code == "InvalidRequest"
    assert complete(front, upload, asked((1, small)), x_amz_mp_object_size="5").status == 200


def test_a_stranger_may_do_none_of_it() -> None:
    reader = Identity("reader", "AKIDREADERREADER", "secret")
    front = Front(reader, box={})
    shelf = Shelf(front)
    for method, target, body in (
        ("POST", "/box/k?uploads", b""),
        ("PUT", "/box/k?partNumber=1&uploadId=id0", b"x"),
        ("GET", "/box/k?uploadId=id0", None),
        ("GET", "/box?uploads", None),
        ("POST", "/box/k?uploadId=id0", b"x"),
        ("DELETE", "/box/k?uploadId=id0", None),
    ):
        assert front.ask(method, target, body=body).status == 403, target
    assert shelf.created == []


# --- listings --------------------------------------------------------------------------------------------------------
def test_parts_are_listed_in_pages(front: Front, shelf: Shelf) -> None:
    upload = create(front)
    for number in (7, 1, 3):
        send(front, upload, number, b"part %d" % number)
    xml = front.get(f"/box/k?uploadId={upload}&max-parts=2").xml
    assert xml.tag == "ListPartsResult"
    assert [part.findtext("PartNumber") for part in xml.findall("Part")] == ["1", "3"]
    assert xml.findtext("IsTruncated") == "true"
    assert xml.findtext("NextPartNumberMarker") == "3"
    part = xml.findall("Part")[0]
    assert part.findtext("ETag") == f'"{hashlib.md5(b"part 1").hexdigest()}"'
    assert (part.findtext("Size"), part.findtext("LastModified")) == ("6", "1994-11-15T12:45:26.750Z")
    xml = front.get(f"/box/k?uploadId={upload}&part-number-marker=3").xml
    assert [part.findtext("PartNumber") for part in xml.findall("Part")] == ["7"]
    assert xml.findtext("IsTruncated") == "false"
    assert front.get("/box/k?uploadId=none").code == "NoSuchUpload"
    assert front.get(f"/box/k?uploadId={upload}&max-parts=x").code == "InvalidArgument"


def _listed(front: Front, query: str) -> tuple[list[str], list[str], ElementTree.Element]:
    answer = front.get(f"/box?uploads&{query}")
    assert answer.status == 200, answer.body
    xml = answer.xml
    keys = [upload.findtext("Key") or "" for upload in xml.findall("Upload")]
    return keys, [prefix.findtext("Prefix") or "" for prefix in xml.findall("CommonPrefixes")], xml


def test_uploads_are_listed_and_rolled_up(front: Front, shelf: Shelf) -> None:
    for key in ("a", "a", "d/1", "d/2", "d/3", "d/4", "d/5", "e", "f/1", "f%2Fx"):
        create(front, key)
    keys, prefixes, _ = _listed(front, "")
    assert keys == ["a", "a", "d/1", "d/2", "d/3", "d/4", "d/5", "e", "f/1", "f/x"]
    keys, prefixes, xml = _listed(front, "delimiter=/")
    assert (keys, prefixes) == (["a", "a", "e"], ["d/", "f/"])
    assert xml.findtext("IsTruncated") == "false"
    keys, prefixes, _ = _listed(front, "prefix=d/&delimiter=/")
    assert (keys, prefixes) == (["d/1", "d/2", "d/3", "d/4", "d/5"], [])
    assert _listed(front, "max-uploads=0")[0] == []


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
@pytest.mark.parametrize("query", ["", "delimiter=/", "prefix=d", "encoding-type=url&delimiter=/"])
def test_following_the_markers_shows_everything_once(front: Front, shelf: Shelf, limit: int, query: str) -> None:
    for key in ("a", "a", "a", "d/1", "d/2", "d/3", "d/4", "e", "e", "g/1", "h"):
        create(front, key)
    wanted_keys, wanted_prefixes, _ = _listed(front, query)
    keys: list[str] = []
    prefixes: list[str] = []
    marker = ""
    for _ in range(20):
        page_keys, page_prefixes, xml = _listed(front, f"{query}&max-uploads={limit}{marker}")
        assert len(page_keys) + len(page_prefixes) <= limit
        keys += page_keys
        prefixes += page_prefixes
        if xml.findtext("IsTruncated") == "false":
            break
        marker = f"&key-marker={xml.findtext('NextKeyMarker')}"
        if xml.findtext("NextUploadIdMarker"):
            marker += f"&upload-id-marker={xml.findtext('NextUploadIdMarker')}"
    assert (keys, prefixes) == (wanted_keys, wanted_prefixes)
