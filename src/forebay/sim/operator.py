"""Everybody else who speaks to a node: its operator, jobs that tell what they will read, writers of shards.

What they ask may be refused; it may not break anything. Members that were appended must be in their shard at the end,
once each, with their bytes.
"""

from __future__ import annotations

import json
import re
import struct
from random import Random
from urllib.parse import quote

import msgspec

from forebay.sim.clients import Answer, Ask, Board, Place

SHARD = "shard.tar"
MEMBER_BYTES = [10, 700, 5_000]
JOBS = ["prefetch", "refresh", "flush", "pin", "unpin", "evict"]
UNFINISHED_MAX = 3


class Operator:
    """`act` does one thing. `appended` and `tried` are members of shards: what was acknowledged, and what may be."""

    def __init__(self, ask: Ask, board: Board, places: list[Place], chance: Random) -> None:
        self._ask, self._board, self._places, self._chance = ask, board, places, chance
        self.buckets = sorted({bucket for bucket, _ in places})
        self.appended: dict[str, dict[str, int]] = {}
        self.tried: dict[str, dict[str, int]] = {}
        self._number = 0

    async def act(self) -> None:
        """One call, or a few that belong together. `OSError` where no answer came."""
        acts = [self._job, self._look, self._append, self._tell, self._many, self._tags, self._parts, self._name_parts]
        await self._chance.choices(acts, [5, 4, 4, 2, 3, 2, 2, 1])[0]()

    async def _asked(self, method: str, target: str, body: bytes | None = None, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await self._ask(method, target, named, body)
        if answer.status == 500:
            self._board.complain(f"{method} {target}: {answer.body[:300]!r}")
        return answer

    async def _job(self) -> None:
        bucket, key = self._chance.choice(self._places)
        call = {"bucket": bucket, "keys": [key]} if self._chance.random() < 0.5 else {"bucket": bucket}
        answer = await self._asked("POST", f"/-/v1/{self._chance.choice(JOBS)}", json.dumps(call).encode())
        if answer.status == 202 and self._chance.random() < 0.2:
            await self._asked("DELETE", f"/-/v1/jobs/{json.loads(answer.body)['job']}")

    async def _look(self) -> None:
        bucket, key = self._chance.choice(self._places)
        await self._asked(
            "GET",
            self._chance.choice(
                [
                    *("/-/v1/status", "/-/metrics", "/-/v1/jobs", f"/-/v1/list/{bucket}", f"/-/v1/lost/{bucket}"),
                    *(f"/-/v1/list/{bucket}?cached=1", f"/-/v1/stat/{bucket}/{key}?revalidate=1", f"/{bucket}?uploads"),
                    *(
                        f"/{bucket}/theirs",
                        f"/{bucket}/theirs",
                        f"/-/v1/stat/{bucket}/{key}",
                        f"/-/v1/listing/{bucket}",
                        f"/-/v1/buckets/{bucket}/check",
                    ),
                ]
            ),
        )

    async def _append(self) -> None:
        bucket = self._chance.choice([each for each in self.buckets if each != "through"] or ["through"])
        self._number += 1
        name = f"member-{self._number}"
        size_bytes = self._chance.choice(MEMBER_BYTES)
        self.tried.setdefault(bucket, {})[name] = size_bytes
        answer = await self._asked("POST", f"/-/v1/members/{bucket}/{SHARD}?name={name}", member_of(name, size_bytes))
        if answer.status == 200:
            self.appended.setdefault(bucket, {})[name] = size_bytes

    async def _tell(self) -> None:
        bucket = self._chance.choice(self.buckets)
        answer = await self._asked("GET", f"/-/v1/listing/{bucket}?refresh=1")
        if answer.status != 200 or "etag" not in answer.headers:
            return
        count = self._chance.randrange(1, 4)
        accesses = b"".join(struct.pack("<III", self._chance.randrange(2), 0, 1) for _ in range(count))
        call = {"job": "train", "bucket": bucket, "prefix": "", "listing": answer.headers["etag"].strip('"')}
        body = msgspec.msgpack.encode(call | {"start": 0, "accesses": accesses})
        await self._asked("POST", "/-/v1/hints/train", body, content_type="application/msgpack")
        await self._asked("PUT", f"/-/v1/hints/train?position={count - 1}")
        if self._chance.random() < 0.3:
            await self._asked("DELETE", "/-/v1/hints/train")

    async def _many(self) -> None:
        items = [{"bucket": bucket, "key": key} for bucket, key in self._chance.sample(self._places, 2)]
        await self._asked("POST", "/-/v1/batch", json.dumps({"items": items}).encode(), content_type="application/json")

    async def _tags(self) -> None:
        bucket, key = self._chance.choice(self._places)
        document = b"<Tagging><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>"
        await self._asked("PUT", f"/{bucket}/{key}?tagging", document)
        await self._asked("GET", f"/{bucket}/{key}?tagging")

    async def _parts(self) -> None:
        """An upload whose parts are copies, and that is looked at and given up."""
        bucket, key = self._chance.choice(self._places)
        begun = await self._asked("POST", f"/{bucket}/{key}?uploads")
        found = re.search(rb"<UploadId>([^<]+)</UploadId>", begun.body)
        if found is None:
            return
        upload = quote(found[1].decode())
        source = f"/{bucket}/source/large"
        await self._asked("PUT", f"/{bucket}/{key}?partNumber=1&uploadId={upload}", x_amz_copy_source=source)
        await self._asked("GET", f"/{bucket}/{key}?uploadId={upload}")
        await self._asked("DELETE", f"/{bucket}/{key}?uploadId={upload}")

    async def _name_parts(self) -> None:
        """Give up what others began and did not end. An upload of somebody who still sends parts is left alone."""
        bucket = self._chance.choice(self.buckets)
        answer = await self._asked("GET", f"/{bucket}?uploads")
        begun = re.findall(rb"<Key>([^<]+)</Key><UploadId>([^<]+)</UploadId>", answer.body)
        for named, upload in begun[UNFINISHED_MAX:]:
            key = named.decode()
            if not self._board.uploading[bucket, key]:
                await self._asked("DELETE", f"/{bucket}/{quote(key)}?uploadId={quote(upload.decode())}")

    async def check(self, bucket: str, *, may_be_older: bool) -> str:
        """What is wrong with the bucket's shard; "" if nothing is."""
        tried, appended = self.tried.get(bucket, {}), {} if may_be_older else self.appended.get(bucket, {})
        if not tried:
            return ""
        answer = await self._asked("GET", f"/{bucket}/{SHARD}")
        try:
            names = [] if answer.status == 404 else members_of(answer.body)
        except ValueError:
            return f"{bucket}/{SHARD} is no tar any more"
        missing = set(appended) - {name for name, _ in names}
        if answer.status not in (200, 404) or missing:
            return f"{bucket}/{SHARD}: {answer.status}, {sorted(missing)} were appended and are not there"
        if len(names) != len(set(names)):
            return f"{bucket}/{SHARD}: {names}: one is there twice"
        for name, data in names:
            if name not in tried or data != member_of(name, tried[name]):
                return f"{bucket}/{SHARD}: {name} is not what was appended"
        return ""


def member_of(name: str, size_bytes: int) -> bytes:
    """The bytes of a member."""
    return Random(name).randbytes(size_bytes)


def members_of(tar: bytes) -> list[tuple[str, bytes]]:
    """Names and bytes of a plain tar's members."""
    found, at = [], 0
    while at + 512 <= len(tar) and tar[at] != 0:
        name = tar[at : at + 100].rstrip(b"\0").decode()
        size_bytes = int(tar[at + 124 : at + 136].rstrip(b"\0 "), 8)
        found.append((name, tar[at + 512 : at + 512 + size_bytes]))
        at += 512 + -(-size_bytes // 512) * 512
    return found
