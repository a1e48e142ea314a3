"""Clients that write, delete and read the same few keys at once, over S3, and write down what they were answered.

Theory. A body says what it is: its label, then bytes drawn from the label, so that any range of it is told from the
same range of any other body. The client knows the labels that anybody tried on a key (`Board.tried`); what it reads
has to be a range of one of them, and of which one is what the history needs. A body that is of none is wrong at once:
that is a mixed version, zeros, or another key's. No two bodies are of the same size, so a HEAD and a listing tell as
well which one is there: they are reads to the judge, and a listing is one of each key of its bucket.

An answer of 503, a connection that broke and a timeout all mean the same: the call may have been done or not. Any other
answer that the call did not ask for is wrong.

Who calls is a coroutine, so that the same clients work in virtual time and, each driven by a thread of its own, against
processes (`tests/storm/judging.py`).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import html
import http.client
import math
import random
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import NamedTuple
from urllib.parse import quote

from forebay.core import limits
from forebay.sim.history import ABSENT, Call, Kind, explain, told

OPEN_MAX = 4  # calls without an answer that a key may have before it is only read: each doubles what the judge tries
FULL = 507
UNSURE = 503  # the status of "may have been done or not"

Place = tuple[str, str]  # bucket and key


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes


Ask = Callable[[str, str, dict[str, str], bytes | None], Awaitable[Answer]]  # OSError, HTTPException: no answer


class Sizes(NamedTuple):
    """What clients write and read, in bytes: bodies with how often each comes, the least part, where ranges begin and
    how long they are."""

    bodies: list[int]
    weights: list[int]
    part: int
    starts: list[int]
    lengths: list[int]


@functools.lru_cache(maxsize=64)
def body_of(label: str, size_bytes: int) -> bytes:
    """Bytes that say what they are, and that differ from any other body everywhere. At least as long as the label."""
    unit = random.Random(label).randbytes(65_521)
    return (label.encode() + b"\n" + unit * (size_bytes // len(unit) + 1))[: max(size_bytes, len(label) + 1)]


class Seen(NamedTuple):
    """What a read of a whole object found: whose body (`ABSENT`: nothing), the ETag it was told, and the size."""

    label: str
    etag: str
    size_bytes: int


_Act = Callable[[Place], Awaitable[object]]


class Board:
    """What all clients of a storm know and wrote down; for several threads. `now` tells what came before what."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.calls: dict[Place, list[Call]] = defaultdict(list)
        self.tried: dict[Place, dict[str, int]] = defaultdict(dict)  # labels and sizes in bytes
        self.wrong: list[str] = []
        self.answered = self.unsure = 0
        self.may_be_full = False  # a disk is, or was since the last quiet moment
        self.machine_stops = 0
        self.copied: set[str] = set()  # labels of which there are copies
        self.etags: dict[tuple[Place, str], str] = {}  # that were told first, by label
        self.open: dict[Place, int] = defaultdict(int)  # calls without an answer since the last quiet moment
        self.acts: Counter[tuple[str, str]] = Counter()  # bucket, what: those that told something
        self.writing: Counter[tuple[Place, str]] = Counter()  # labels whose write there has no answer yet
        self.uploading: Counter[Place] = Counter()  # clients that begin an upload there, or send its parts
        self._sizes: set[int] = set()  # of all bodies ever
        self._next: dict[int, int] = {}  # by the size that was wished for: where to look for a free one
        self._lock = threading.Lock()

    def copying(self, place: Place, label: str, size_bytes: int) -> None:
        with self._lock:
            self.copied.add(label)
            self.tried[place][label] = size_bytes

    def new(self, place: Place, label: str, size_bytes: int) -> bytes:
        """A body for the label, of the next size that no other body ever had."""
        with self._lock:
            wished, size_bytes = size_bytes, self._next.get(size_bytes, size_bytes)
            while size_bytes in self._sizes:
                size_bytes += 1
            self._sizes.add(size_bytes)
            self._next[wished] = size_bytes + 1
            self.tried[place][label] = size_bytes
        return body_of(label, size_bytes)

    def forget(self, place: Place, kept: set[str]) -> None:
        """Only these labels may still be read there."""
        with self._lock:
            self.tried[place] = {label: size for label, size in self.tried[place].items() if label in kept}
            self.etags = {what: etag for what, etag in self.etags.items() if what[0] != place or what[1] in kept}

    def note(self, place: Place, call: Call, act: str) -> None:
        with self._lock:
            self.calls[place].append(call._replace(act=act))
            self.acts[place[0], act] += not call.is_open
            self.answered += not call.is_open
            self.unsure += call.is_open
            self.open[place] += call.is_open

    def complain(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)

    def labels_of(self, place: Place, body: bytes, start: int, total: int) -> list[str]:
        """Whose bytes [start, start + len) these may be, of a body of `total` bytes. A single byte is many's."""
        with self._lock:
            tried = [label for label, size_bytes in self.tried[place].items() if size_bytes == total]
        return [label for label in tried if body_of(label, total)[start : start + len(body)] == body]

    def label_of(self, place: Place, size_bytes: int) -> str | None:
        """Whose body is of that size."""
        with self._lock:
            return next((label for label, size in self.tried[place].items() if size == size_bytes), None)

    def told(self) -> str:
        """What was done, and how often, over all buckets."""
        total: Counter[str] = Counter()
        for (_, act), count in self.acts.items():
            total[act] += count
        return ", ".join(f"{act} {count}" for act, count in sorted(total.items()))


class Client:
    """Makes one call after the other. One line a call on the board."""

    def __init__(
        self,
        ask: Ask,
        pause: Callable[[], Awaitable[None]],
        board: Board,
        name: str,
        places: list[Place],
        sources: list[str],
        seed: int,
        sizes: Sizes,
        *,
        changing: Collection[str] = (),
        fleeting: Collection[str] = (),
    ) -> None:
        """`pause` after a call without an answer; `changing`: buckets where the ETag of one body may become another;
        `fleeting`: those whose uploads end with their machine."""
        self.name = name
        self._ask, self._pause, self._board, self._places, self._sources = ask, pause, board, places, sources
        self._sizes, self._changing, self._fleeting = sizes, changing, fleeting
        self._stops = 0  # of machines, before the upload began
        self._random = random.Random(seed)
        self._number = 0
        self._found: dict[Place, Seen] = {}

    async def call(self) -> None:
        """One call, or one of several steps."""
        reads: list[_Act] = [self.read, self._head, self.list_bucket]
        writes: list[_Act] = [
            self._put,
            self._create,
            self._swap,
            self._copy,
            self._remove,
            self._remove_some,
            self._multipart,
        ]
        place = self._random.choice(self._places)
        if self._random.random() < 0.45 or self._board.open[place] >= OPEN_MAX:
            await self._random.choices(reads, [6, 2, 2])[0](place)
        else:
            await self._random.choices(writes, [6, 2, 3, 3, 2, 1, 1])[0](place)

    # --- reads -------------------------------------------------------------------------------------------------------
    async def read(self, place: Place, whole: bool = False) -> Seen | None:
        """What a read found, or None where there was no answer."""
        start = 0 if whole else self._random.choice(self._sizes.starts)
        end = start + self._random.choice(self._sizes.lengths)
        headers = {} if whole or self._random.random() < 0.5 else {"Range": f"bytes={start}-{end - 1}"}
        began = self._board.now()
        answer = await self._asked("GET", place, headers=headers)
        if answer is None:
            return None
        if answer.status == 404 and b"NoSuchKey" in answer.body:
            labels = [ABSENT]
        elif answer.status == 416:  # it was shorter: which one it was is not told
            return None
        elif answer.status == 206:
            first, last, total = map(int, re.findall(r"\d+", answer.headers["content-range"]))
            if first != start or last - first + 1 != len(answer.body):
                self._wrong(place, f"asked {headers}, got {answer.headers['content-range']}")
                return None
            labels = self._board.labels_of(place, answer.body, start, total)
        elif answer.status == 200:
            labels = self._board.labels_of(place, answer.body, 0, len(answer.body))
        else:
            self._refused(place, "GET", answer)
            return None
        if not labels:
            said = f"{len(answer.body)} bytes that nobody wrote: {_glimpse(answer.body)}, {dict(answer.headers)}"
            self._wrong(place, f"{headers}: {said}")
            return None
        if len(labels) > 1:
            return None
        self._board.note(place, Call("read", labels[0], began, self._board.now()), "range" if headers else "get")
        etag = answer.headers.get("etag", "")
        self._check_etag(place, labels[0], etag, "GET")
        return Seen(labels[0], etag, len(answer.body))

    async def _head(self, place: Place) -> None:
        began = self._board.now()
        answer = await self._asked("HEAD", place)
        if answer is None:
            return None
        if answer.status not in (200, 404):
            return self._refused(place, "HEAD", answer)
        size_bytes = int(answer.headers["content-length"]) if answer.status == 200 else None
        etag = answer.headers.get("etag", "")
        return self._found_size(place, size_bytes, etag, began, self._board.now(), "head")

    async def list_bucket(self, place: Place) -> bool:
        """All keys of its bucket, in one page or several, as it was while the first to the last was asked for. Whether
        there was an answer."""
        version, page = self._random.choice(["", "list-type=2&"]), self._random.choice([1000, 1000, 2])
        found: dict[str, tuple[int, str]] = {}
        began, after = self._board.now(), ""
        while True:
            answer = await self._asked("GET", (place[0], ""), f"{version}max-keys={page}{after}")
            if answer is None:
                return False
            if answer.status != 200:
                self._refused(place, "GET ?list", answer)
                return False
            found |= _listed(answer.body)
            if b"<IsTruncated>true" not in answer.body:
                break
            if version:
                token = re.search(rb"<NextContinuationToken>([^<]+)<", answer.body)
                assert token is not None, answer
                after = f"&continuation-token={quote(token[1].decode(), safe='')}"
            else:
                after = f"&marker={quote(max(found), safe='')}"
        ended = self._board.now()
        for each in self._places:
            if each[0] == place[0]:
                size, etag = found.get(each[1], (None, ""))
                self._found_size(each, size, etag, began, ended, "list v2" if version else "list v1")
        return True

    def _found_size(
        self, place: Place, size_bytes: int | None, etag: str, began: float, ended: float, act: str
    ) -> None:
        label = ABSENT if size_bytes is None else self._board.label_of(place, size_bytes)
        if label is None:
            self._wrong(place, f"{act}: {size_bytes} bytes, which nobody wrote")
        else:
            self._board.note(place, Call("read", label, began, ended), act)
            self._check_etag(place, label, etag, act)

    def _check_etag(self, place: Place, label: str, etag: str, act: str) -> None:
        """Whether it is what anybody was told before, where it lasts."""
        seen = Seen(label, etag.strip('"'), self._board.tried[place].get(label, 0))
        if label == ABSENT or not seen.etag:
            return
        before = self._board.etags.setdefault((place, label), seen.etag)
        if before != seen.etag and self._lasts(place, seen) and self._lasts(place, seen._replace(etag=before)):
            self._wrong(place, f"{act}: the ETag of {label} is {seen.etag}, and was {before}")

    # --- writes ------------------------------------------------------------------------------------------------------
    def _label(self, place: Place) -> str:
        self._number += 1
        return f"{self.name}.{self._number} {place[0]}/{place[1]}"

    def _new(self, place: Place) -> tuple[str, bytes]:
        label = self._label(place)
        return label, self._board.new(place, label, self._random.choices(self._sizes.bodies, self._sizes.weights)[0])

    async def _put(self, place: Place) -> None:
        label, body = self._new(place)
        headers = {}
        if self._random.random() < 0.5:
            headers["Content-MD5"] = base64.b64encode(hashlib.md5(body).digest()).decode()
        await self._write("write", place, label, "PUT", body=body, headers=headers)

    async def _create(self, place: Place) -> None:
        label, body = self._new(place)
        await self._write("create", place, label, "PUT", body=body, headers={"If-None-Match": "*"})

    async def _swap(self, place: Place) -> None:
        """Overwrite what a read has found, now or long ago, if it is still that."""
        seen = self._found.get(place) if self._random.random() < 0.4 else await self.read(place, whole=True)
        if seen is None or seen.label == ABSENT:
            return
        self._found[place] = seen
        label, body = self._new(place)
        await self._write("swap", place, label, "PUT", body=body, headers={"If-Match": seen.etag}, seen=seen)

    async def _copy(self, place: Place) -> None:
        """From a source that never changes, or from another key while it is what a read has found."""
        headers = {}
        if self._random.random() < 0.5:
            source = (place[0], self._random.choice(self._sources))
            (label, size_bytes), *_ = self._board.tried[source].items()
        else:
            source = self._random.choice([each for each in self._places if each[0] == place[0] and each != place])
            seen = self._found.get(source) if self._random.random() < 0.4 else await self.read(source, whole=True)
            if seen is None or seen.label == ABSENT or not self._lasts(source, seen):
                return
            self._found[source] = seen
            label, headers["x-amz-copy-source-if-match"], size_bytes = seen
        self._board.copying(place, label, size_bytes)
        headers["x-amz-copy-source"] = f"/{source[0]}/{quote(source[1])}"
        await self._write("write", place, label, "PUT", headers=headers, source=source)

    async def _remove(self, place: Place) -> None:
        await self._write("delete", place, ABSENT, "DELETE")

    async def _remove_some(self, place: Place) -> None:
        """Several keys of its bucket in one call; each is told by itself."""
        others = [other for other in self._places if other[0] == place[0] and other != place]
        some = [place, *self._random.sample(others, min(2, len(others)))]
        listed = "".join(f"<Object><Key>{key}</Key></Object>" for _, key in some)
        document = f"<Delete>{listed}</Delete>".encode()
        digest = base64.b64encode(hashlib.md5(document).digest()).decode()
        began = self._board.now()
        answer = await self._told("POST", (place[0], ""), "delete", document, {"Content-MD5": digest})
        ended = self._board.now()
        gone = {found.decode() for found in re.findall(rb"<Deleted><Key>([^<]+)</Key>", answer.body if answer else b"")}
        if answer is not None and answer.status != 200:
            self._refused(place, "POST ?delete", answer)
        for each in some:
            self._board.note(each, Call("delete", ABSENT, began, ended if each[1] in gone else math.inf), "delete some")
        if answer is None:
            await self._pause()

    async def _multipart(self, place: Place) -> None:
        self._board.uploading[place] += 1
        try:
            await self._upload(place)
        finally:
            self._board.uploading[place] -= 1

    async def _upload(self, place: Place) -> None:
        label = self._label(place)
        body = self._board.new(place, label, self._sizes.part + self._random.choice([17, self._sizes.part // 5]))
        self._stops = self._board.machine_stops
        began = await self._asked("POST", place, "uploads")
        found = re.search(rb"<UploadId>([^<]+)</UploadId>", began.body if began else b"")
        if began is None or found is None:
            return None if began is None else self._refused(place, "POST ?uploads", began)
        upload = quote(found[1].decode())
        tags = []
        for number, start in enumerate(range(0, len(body), self._sizes.part), 1):
            part = body[start : start + self._sizes.part]
            sent = await self._asked("PUT", place, f"partNumber={number}&uploadId={upload}", part)
            if sent is None or sent.status != 200:
                return None if sent is None else self._refused(place, "PUT part", sent)
            tags.append(f"<Part><PartNumber>{number}</PartNumber><ETag>{hashlib.md5(part).hexdigest()}</ETag></Part>")
        document = f"<CompleteMultipartUpload>{''.join(tags)}</CompleteMultipartUpload>".encode()
        kind: Kind = self._random.choice(["write", "create"])
        headers = {"If-None-Match": "*"} if kind == "create" else {}
        return await self._write(kind, place, label, "POST", f"uploadId={upload}", document, headers)

    async def _write(
        self,
        kind: Kind,
        place: Place,
        label: str,
        method: str,
        query: str = "",
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        seen: Seen | None = None,
        source: Place | None = None,
    ) -> None:
        before = "" if seen is None else seen.label
        began = self._board.now()
        again = self._board.writing[(source, label) if source else (place, before)] > 0
        self._board.writing[place, label] += 1
        try:
            answer = await self._told(method, place, query, body, headers)
        finally:
            self._board.writing[place, label] -= 1
        ended = self._board.now()
        act = "multipart" if query else "copy" if source else kind if label else "delete"
        status = UNSURE if answer is None else answer.status
        if answer is not None and status == 200 and b"<Error>" in answer.body:  # told after the head had been sent
            status = 412 if b"PreconditionFailed" in answer.body else UNSURE
        if status == UNSURE:  # noted before the pause, in which the machine may stop
            self._board.note(place, Call(kind, label, began, math.inf, before), act)
            if answer is None:
                await self._pause()
        elif status == 412 and again:
            return  # what was read may have been put once more since, when an answer was lost: another version
        elif source in self._places and status in (404, 412):  # the source is not what was read any more
            refused: Call = Call("refused swap", label, began, ended, label)
            self._board.note(source, Call("read", ABSENT, began, ended) if status == 404 else refused, "copy refused")
        elif status == 412 and seen is not None and not self._lasts(place, seen):
            return
        elif status == 412 and kind in ("create", "swap"):
            told: Kind = "refused create" if kind == "create" else "refused swap"
            self._board.note(place, Call(told, label, began, ended, before), f"{act} refused")
        elif status == 404 and kind == "swap":  # what was read is gone: S3 says so in this way
            self._board.note(place, Call("read", ABSENT, began, ended), f"{act} refused")
        elif answer is not None and status in (200, 204):
            self._board.note(place, Call(kind, label, began, ended, before), act)
            self._check_etag(place, label, answer.headers.get("etag", ""), act)
        elif answer is not None:
            self._refused(place, f"{method} {kind}", answer)

    # --- asking ------------------------------------------------------------------------------------------------------
    async def _asked(
        self,
        method: str,
        place: Place,
        query: str = "",
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer | None:
        """The answer; after a pause None, if what was asked may have been done or not."""
        answer = await self._told(method, place, query, body, headers)
        if answer is None:
            await self._pause()
        return answer

    async def _told(
        self,
        method: str,
        place: Place,
        query: str = "",
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer | None:
        target = f"/{place[0]}/{quote(place[1])}" + (f"?{query}" if query else "")
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer = await self._ask(method, target, headers or {}, body)
            if answer.status != UNSURE:
                return answer
        return None

    def _lasts(self, place: Place, seen: Seen) -> bool:
        """Whether the ETag stays what it is while the body does. What was written back gets the bucket service's when
        it is fetched again, and the node's when it is copied onto once more. Those are the same where both are the MD5;
        else a refusal tells nothing. An object made of parts and its copy have two ETags in any bucket
        (docs/semantics-uploads.md)."""
        is_whole = "-" not in seen.etag
        if is_whole and seen.size_bytes <= limits.ETAG_MD5_BYTES_MAX:
            return True
        return place[0] not in self._changing and (is_whole or seen.label not in self._board.copied)

    def _wrong(self, place: Place, what: str) -> None:
        self._board.complain(f"{self.name}, {place[0]}/{place[1]}: {what}")

    def _refused(self, place: Place, what: str, answer: Answer) -> None:
        """507 while a disk is full says that nothing was done, and is held to it: no call is noted."""
        if answer.status == FULL and self._board.may_be_full:
            return
        if b"NoSuchUpload" in answer.body and place[0] in self._fleeting and self._board.machine_stops > self._stops:
            return
        self._wrong(place, f"{what}: status {answer.status}, {answer.body[:300]!r}")


def _listed(document: bytes) -> dict[str, tuple[int, str]]:
    """Size and ETag by key."""
    found = re.findall(r"<Key>([^<]+)</Key>(.*?)<Size>(\d+)</Size>", document.decode(), re.DOTALL)
    etags = (re.search(r"<ETag>([^<]+)</ETag>", between) for _, between, _ in found)
    return {
        key: (int(size), html.unescape(etag[1]) if etag else "")
        for (key, _, size), etag in zip(found, etags, strict=True)
    }


def _glimpse(body: bytes) -> str:
    zeros = next((at for at in range(0, len(body), 4096) if not any(body[at : at + 4096])), None)
    return f"{body[:60]!r}" + ("" if zeros is None else f", zeros from {zeros}")


class Judge:
    """`content` is what each key may hold. Only for quiet moments: no client is in a call."""

    def __init__(self, board: Board, places: list[Place]) -> None:
        self.board = board
        self.content: dict[Place, set[str]] = {place: {ABSENT} for place in places}

    def judge(self, place: Place) -> list[str]:
        """What is wrong with the calls to this key since the last time. Its history begins anew with what it may hold
        now: read it before, or that is much."""
        calls = self.board.calls.pop(place, [])
        self.board.open.pop(place, None)
        after = explain(calls, self.content[place])
        wrong = []
        if not after:
            before = " or ".join(sorted(each or "nothing" for each in self.content[place]))
            wrong.append(f"{place[0]}/{place[1]}: nothing explains this, where {before} was:\n{told(calls)}")
        self.content[place] = after or self.content[place]
        self.board.forget(place, self.content[place])
        return wrong
