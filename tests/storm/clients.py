"""Clients that write, delete and read the same few keys at once, over S3, and write down what they were answered.

Theory. A body says what it is: its label, then bytes drawn from the label, so that any range of it is told from the
same range of any other body. The client knows the labels that anybody tried on a key (`Board.tried`); what it reads
has to be a range of one of them, and of which one is what the history needs. A body that is of none is wrong at once:
that is a mixed version, zeros, or another key's.

An answer of 503, a connection that broke and a timeout all mean the same: the call may have been done or not. Any other
answer that the call did not ask for is wrong.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import http.client
import math
import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import quote

from tests.storm.history import ABSENT, Call, Kind

MIB = 1 << 20
SIZES = [100, 900, 9_000, 40_000, 300_000, MIB + 7, 5 * MIB + 17]
SIZE_WEIGHTS = [6, 6, 4, 4, 2, 2, 1]
PART_BYTES = 5 * MIB
OPEN_MAX = 4  # calls without an answer that a key may have before it is only read: each doubles what the judge tries
AFTER_UNSURE_S = 0.1  # as a client's own retry would wait
FULL = 507
UNSURE = 503  # the status of "may have been done or not"

Place = tuple[str, str]  # bucket and key


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes


Ask = Callable[[str, str, dict[str, str], bytes | None], Answer]  # raises OSError or HTTPException without an answer


@functools.lru_cache(maxsize=64)
def body_of(label: str, size_bytes: int) -> bytes:
    """Bytes that say what they are, and that differ from any other body everywhere. At least as long as the label."""
    unit = random.Random(label).randbytes(65_521)
    return (label.encode() + b"\n" + unit * (size_bytes // len(unit) + 1))[: max(size_bytes, len(label) + 1)]


class Seen(NamedTuple):
    """What a read found: whose body (`ABSENT`: nothing), and the ETag it was told."""

    label: str
    etag: str


class Board:
    """What all clients of a storm know and wrote down; for several threads. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.calls: dict[Place, list[Call]] = defaultdict(list)
        self.tried: dict[Place, dict[str, int]] = defaultdict(dict)  # labels and sizes in bytes
        self.wrong: list[str] = []
        self.answered = self.unsure = 0
        self.may_be_full = False  # a disk is, or was since the last quiet moment
        self.open: dict[Place, int] = defaultdict(int)  # calls without an answer since the last quiet moment
        self._lock = threading.Lock()

    def trying(self, place: Place, label: str, size_bytes: int) -> None:
        with self._lock:
            self.tried[place][label] = size_bytes

    def note(self, place: Place, call: Call) -> None:
        with self._lock:
            self.calls[place].append(call)
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


class Client(threading.Thread):
    """Calls until it is told to stop. One line a call on the board."""

    def __init__(self, ask: Ask, board: Board, name: str, places: list[Place], sources: list[str], seed: int) -> None:
        super().__init__(daemon=True, name=name)
        self.stopping = threading.Event()
        self.going = threading.Event()
        self.going.set()
        self.resting = threading.Event()
        self._ask, self._board, self._places, self._sources = ask, board, places, sources
        self._random = random.Random(seed)
        self._number = 0
        self._found: dict[Place, Seen] = {}

    # --- its life ----------------------------------------------------------------------------------------------------
    def run(self) -> None:
        acts = [self._put, self._create, self._swap, self._copy, self._remove, self._remove_some, self._multipart]
        weights = [6, 2, 3, 2, 2, 1, 1]
        while not self.stopping.is_set() and not self._board.wrong:
            if not self.going.is_set():
                self.resting.set()
                self.going.wait()
                self.resting.clear()
                continue
            place = self._random.choice(self._places)
            if self._random.random() < 0.45 or self._board.open[place] >= OPEN_MAX:
                self.read(place)
            else:
                self._random.choices(acts, weights)[0](place)
        self.resting.set()

    def rest(self) -> None:
        """No call from now on until `go_on`. Wait for `resting` to know that the last one is over."""
        self.going.clear()

    def go_on(self) -> None:
        self.resting.clear()
        self.going.set()

    # --- reads -------------------------------------------------------------------------------------------------------
    def read(self, place: Place, whole: bool = False) -> Seen | None:
        """What a read found, or None where there was no answer."""
        start = 0 if whole else self._random.choice([0, 0, 1, 50, 70_000, MIB])
        end = start + self._random.choice([1, 40, 30_000, 2 * MIB])
        headers = {} if whole or self._random.random() < 0.5 else {"Range": f"bytes={start}-{end - 1}"}
        began = time.monotonic()
        answer = self._asked("GET", place, headers=headers)
        if answer is None:
            return None
        if answer.status == 404 and b"NoSuchKey" in answer.body:
            labels = [ABSENT]
        elif answer.status == 416:  # it was shorter: which one it was is not told
            return None
        elif answer.status == 206:
            first, last, total = map(int, re.findall(r"\d+", answer.headers["content-range"]))
            if first != start or last - first + 1 != len(answer.body):
                return self._wrong(place, f"asked {headers}, got {answer.headers['content-range']}")
            labels = self._board.labels_of(place, answer.body, start, total)
        elif answer.status == 200:
            labels = self._board.labels_of(place, answer.body, 0, len(answer.body))
        else:
            return self._refused(place, "GET", answer)
        if not labels:
            said = f"{len(answer.body)} bytes that nobody wrote: {_glimpse(answer.body)}, {dict(answer.headers)}"
            return self._wrong(place, f"{headers}: {said}")
        if len(labels) > 1:
            return None
        self._board.note(place, Call("read", labels[0], began, time.monotonic()))
        return Seen(labels[0], answer.headers.get("etag", ""))

    # --- writes ------------------------------------------------------------------------------------------------------
    def _label(self, place: Place) -> str:
        self._number += 1
        return f"{self.name}.{self._number} {place[0]}/{place[1]}"

    def _new(self, place: Place) -> tuple[str, bytes]:
        label = self._label(place)
        body = body_of(label, self._random.choices(SIZES, SIZE_WEIGHTS)[0])
        self._board.trying(place, label, len(body))
        return label, body

    def _put(self, place: Place) -> None:
        label, body = self._new(place)
        self._write("write", place, label, "PUT", body=body)

    def _create(self, place: Place) -> None:
        label, body = self._new(place)
        self._write("create", place, label, "PUT", body=body, headers={"If-None-Match": "*"})

    def _swap(self, place: Place) -> None:
        """Overwrite what a read has found, now or long ago, if it is still that."""
        seen = self._found.get(place) if self._random.random() < 0.4 else self.read(place, whole=True)
        if seen is None or seen.label == ABSENT:
            return
        self._found[place] = seen
        label, body = self._new(place)
        self._write("swap", place, label, "PUT", body=body, headers={"If-Match": seen.etag}, seen=seen.label)

    def _copy(self, place: Place) -> None:
        """From a source that never changes: what it holds is the label's body."""
        source = self._random.choice(self._sources)
        known = self._board.tried[place[0], source]
        (label, size_bytes), *_ = known.items()
        self._board.trying(place, label, size_bytes)
        self._write("write", place, label, "PUT", headers={"x-amz-copy-source": f"/{place[0]}/{quote(source)}"})

    def _remove(self, place: Place) -> None:
        self._write("delete", place, ABSENT, "DELETE")

    def _remove_some(self, place: Place) -> None:
        """Several keys of its bucket in one call; each is told by itself."""
        others = [other for other in self._places if other[0] == place[0] and other != place]
        some = [place, *self._random.sample(others, min(2, len(others)))]
        listed = "".join(f"<Object><Key>{key}</Key></Object>" for _, key in some)
        document = f"<Delete>{listed}</Delete>".encode()
        digest = base64.b64encode(hashlib.md5(document).digest()).decode()
        began = time.monotonic()
        answer = self._asked("POST", (place[0], ""), "delete", document, {"Content-MD5": digest})
        ended = time.monotonic()
        gone = {found.decode() for found in re.findall(rb"<Deleted><Key>([^<]+)</Key>", answer.body if answer else b"")}
        if answer is not None and answer.status != 200:
            self._refused(place, "POST ?delete", answer)
        for each in some:
            self._board.note(each, Call("delete", ABSENT, began, ended if each[1] in gone else math.inf))

    def _multipart(self, place: Place) -> None:
        label = self._label(place)
        body = body_of(label, PART_BYTES + self._random.choice([17, MIB]))
        began = self._asked("POST", place, "uploads")
        found = re.search(rb"<UploadId>([^<]+)</UploadId>", began.body if began else b"")
        if began is None or found is None:
            return None if began is None else self._refused(place, "POST ?uploads", began)
        upload = quote(found[1].decode())
        tags = []
        for number, start in enumerate(range(0, len(body), PART_BYTES), 1):
            part = body[start : start + PART_BYTES]
            sent = self._asked("PUT", place, f"partNumber={number}&uploadId={upload}", part)
            if sent is None or sent.status != 200:
                return None if sent is None else self._refused(place, "PUT part", sent)
            tags.append(f"<Part><PartNumber>{number}</PartNumber><ETag>{hashlib.md5(part).hexdigest()}</ETag></Part>")
        self._board.trying(place, label, len(body))
        document = f"<CompleteMultipartUpload>{''.join(tags)}</CompleteMultipartUpload>".encode()
        kind: Kind = self._random.choice(["write", "create"])
        headers = {"If-None-Match": "*"} if kind == "create" else {}
        return self._write(kind, place, label, "POST", f"uploadId={upload}", document, headers)

    def _write(
        self,
        kind: Kind,
        place: Place,
        label: str,
        method: str,
        query: str = "",
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        seen: str = "",
    ) -> None:
        began = time.monotonic()
        answer = self._asked(method, place, query, body, headers)
        ended = time.monotonic()
        status = UNSURE if answer is None else answer.status
        if answer is not None and status == 200 and b"<Error>" in answer.body:  # told after the head had been sent
            status = 412 if b"PreconditionFailed" in answer.body else UNSURE
        if status == UNSURE:
            self._board.note(place, Call(kind, label, began, math.inf, seen))
        elif status == 412 and kind in ("create", "swap"):
            refused: Kind = "refused create" if kind == "create" else "refused swap"
            self._board.note(place, Call(refused, label, began, ended, seen))
        elif status == 404 and kind == "swap":  # what was read is gone: S3 says so in this way
            self._board.note(place, Call("read", ABSENT, began, ended))
        elif status in (200, 204):
            self._board.note(place, Call(kind, label, began, ended, seen))
        elif answer is not None:
            self._refused(place, f"{method} {kind}", answer)

    # --- asking ------------------------------------------------------------------------------------------------------
    def _asked(
        self,
        method: str,
        place: Place,
        query: str = "",
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer | None:
        target = f"/{place[0]}/{quote(place[1])}" + (f"?{query}" if query else "")
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer = self._ask(method, target, headers or {}, body)
            if answer.status != UNSURE:
                return answer
        self.stopping.wait(AFTER_UNSURE_S)
        return None

    def _wrong(self, place: Place, what: str) -> None:
        self._board.complain(f"{self.name}, {place[0]}/{place[1]}: {what}")

    def _refused(self, place: Place, what: str, answer: Answer) -> None:
        """507 while a disk is full says that nothing was done, and is held to it: no call is noted."""
        if answer.status == FULL and self._board.may_be_full:
            return
        self._wrong(place, f"{what}: status {answer.status}, {answer.body[:300]!r}")


def _glimpse(body: bytes) -> str:
    zeros = next((at for at in range(0, len(body), 4096) if not any(body[at : at + 4096])), None)
    return f"{body[:60]!r}" + ("" if zeros is None else f", zeros from {zeros}")
