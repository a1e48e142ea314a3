"""A store in memory that answers the clients of a storm, right or with one planted fault: what the judge must find.

It stands for a node only here, to judge the judge. It is quick, so that a storm of some thousand calls takes a second.
"""

from __future__ import annotations

import hashlib
import random
import re
import threading
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

from forebay.sim.clients import Answer

Fault = Literal[
    "",
    "forgets a write",
    "older version",
    "zeros",
    "mixed versions",
    "another key's bytes",
    "ignores If-None-Match",
    "ignores If-Match",
    "412 for one's own",
    "done twice",
    "deleted comes back",
    "cut range",
    "older HEAD",
    "listing without a key",
    "older listing",
    "older ETag in a listing",
    "copies another version",
]
RATE = 0.2  # of the calls where the fault can strike


class FakeStore:
    """`ask` as a client calls it. `lossy`: the share of calls without an answer, half of them done all the same."""

    def __init__(self, seed: int, fault: Fault = "", lossy: float = 0.05) -> None:
        self.fault, self.struck = fault, 0
        self._objects: dict[str, bytes] = {}
        self._older: dict[str, bytes | None] = {}
        self._late: list[tuple[str, bytes]] = []
        self._parts: dict[str, dict[int, bytes]] = {}
        self._random, self._lossy = random.Random(seed), lossy
        self._lock = threading.Lock()

    def ask(self, method: str, target: str, headers: dict[str, str], body: bytes | None) -> Answer:
        with self._lock:
            draw = self._random.random()
            if draw < self._lossy / 2:
                raise ConnectionResetError
            answer = self._answer(method, target, {name.lower(): value for name, value in headers.items()}, body or b"")
            if draw < self._lossy:
                raise ConnectionResetError
            return answer

    def _strikes(self, fault: Fault) -> bool:
        strikes = self.fault == fault and self._random.random() < RATE
        self.struck += strikes
        return strikes

    # --- calls -------------------------------------------------------------------------------------------------------
    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        url = urlsplit(target)
        name, query = unquote(url.path), parse_qs(url.query, keep_blank_values=True)
        if self._late and self._random.random() < 0.2:
            key, again = self._late.pop()
            self._set(key, again)
        if method in ("GET", "HEAD") and name.endswith("/"):
            return self._list(name, query)
        if method == "GET":
            return self._get(name, headers)
        if method == "HEAD":
            return self._head(name)
        if method == "DELETE":
            return self._delete([name])
        if "delete" in query:
            return self._delete([name + key.decode() for key in re.findall(rb"<Key>([^<]+)</Key>", body)])
        if "uploads" in query:
            upload = str(len(self._parts))
            self._parts[upload] = {}
            return Answer(200, {}, f"<UploadId>{upload}</UploadId>".encode())
        if "partNumber" in query:
            self._parts[query["uploadId"][0]][int(query["partNumber"][0])] = body
            return Answer(200, {}, b"")
        if "uploadId" in query:
            body = b"".join(self._parts[query["uploadId"][0]].values())
        if "x-amz-copy-source" in headers:
            source = self._objects.get(unquote(headers["x-amz-copy-source"]))
            if source is None:
                return Answer(404, {}, b"<Code>NoSuchKey</Code>")
            wanted = headers.get("x-amz-copy-source-if-match", _etag(source))
            if wanted != _etag(source) and not self._strikes("copies another version"):
                return Answer(412, {}, b"<Code>PreconditionFailed</Code>")
            body = source
        return self._put(name, headers, body)

    def _get(self, name: str, headers: dict[str, str]) -> Answer:
        body = self._objects.get(name)
        if (older := self._older.get(name)) is not None and self._strikes("older version"):
            body = older
        if body is None:
            return Answer(404, {}, b"<Code>NoSuchKey</Code>")
        told = {"etag": _etag(body)}
        if len(body) > 9000 and self._strikes("zeros"):
            body = body[:4096] + bytes(4096) + body[8192:]
        if older is not None and 200 < len(older) <= len(body) and self._strikes("mixed versions"):
            body = older[:100] + body[100:]
        others = [other for key, other in self._objects.items() if key != name]
        if others and self._strikes("another key's bytes"):
            body = self._random.choice(others)
        if "range" not in headers:
            return Answer(200, told, body)
        start, end = map(int, re.findall(r"\d+", headers["range"]))
        if start >= len(body):
            return Answer(416, {}, b"")
        part = body[start : end + 1]
        told["content-range"] = f"bytes {start}-{start + len(part) - 1}/{len(body)}"
        return Answer(206, told, part[1:] if self._strikes("cut range") else part)

    def _head(self, name: str) -> Answer:
        body = self._objects.get(name)
        if (older := self._older.get(name)) is not None and self._strikes("older HEAD"):
            body = older
        return Answer(404, {}, b"") if body is None else Answer(200, {"content-length": str(len(body))}, b"")

    def _list(self, folder: str, query: dict[str, list[str]]) -> Answer:
        after = query.get("continuation-token", query.get("marker", [""]))[0]
        left = sorted(name for name in self._objects if name.startswith(folder) and name[len(folder) :] > after)
        page = left[: int(query["max-keys"][0])]
        rows = ""
        for name in page:
            size_bytes, etag = len(self._objects[name]), _etag(self._objects[name])
            if self._strikes("listing without a key"):
                continue
            if (older := self._older.get(name)) is not None and self._strikes("older listing"):
                size_bytes, etag = len(older), _etag(older)
            if older is not None and older != self._objects[name] and self._strikes("older ETag in a listing"):
                etag = _etag(older)
            told = f"<Key>{name[len(folder) :]}</Key><ETag>&quot;{etag}&quot;</ETag><Size>{size_bytes}</Size>"
            rows += f"<Contents>{told}</Contents>"
        if len(page) < len(left):
            last = page[-1][len(folder) :]
            rows += f"<NextContinuationToken>{last}</NextContinuationToken><IsTruncated>true</IsTruncated>"
        return Answer(200, {}, f"<ListBucketResult>{rows}</ListBucketResult>".encode())

    def _put(self, name: str, headers: dict[str, str], body: bytes) -> Answer:
        there = self._objects.get(name)
        if headers.get("if-none-match") and there is not None and not self._strikes("ignores If-None-Match"):
            return Answer(412, {}, b"<Code>PreconditionFailed</Code>")
        if "if-match" in headers and there is None:
            return Answer(404, {}, b"<Code>NoSuchKey</Code>")
        same = there is not None and headers.get("if-match") == _etag(there)
        if "if-match" in headers and not same and not self._strikes("ignores If-Match"):
            return Answer(412, {}, b"<Code>PreconditionFailed</Code>")
        if not self._strikes("forgets a write"):
            self._set(name, body)
        if self._strikes("done twice"):
            self._late.append((name, body))
        if headers.get("if-none-match") and self._strikes("412 for one's own"):
            return Answer(412, {}, b"<Code>PreconditionFailed</Code>")
        return Answer(200, {}, b"")

    def _set(self, name: str, body: bytes) -> None:
        self._older[name] = self._objects.get(name)
        self._objects[name] = body

    def _delete(self, names: list[str]) -> Answer:
        for name in names:
            if not self._strikes("deleted comes back"):
                self._objects.pop(name, None)
        keys = "".join(f"<Deleted><Key>{name.split('/', 2)[2]}</Key></Deleted>" for name in names)
        return Answer(200 if len(names) > 1 else 204, {}, f"<DeleteResult>{keys}</DeleteResult>".encode())


def _etag(body: bytes) -> str:
    return hashlib.md5(body).hexdigest()
