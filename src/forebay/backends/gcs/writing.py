"""Writes to Google Cloud Storage: puts, deletes and copies by its JSON API, uploads by its XML API.

Theory. Google's conditions name an object's *generation*, while readers know its ETag. So a conditional write first
looks at the object and uses the generation of that ETag as its condition: exact, for one more request. The JSON API
takes a body and its metadata in one request (multipart/related), but does not return the ETag that readers see. So a
put looks at the object afterwards and checks that it is the generation that the put made.

Uploads use the XML API, which is S3's with other names (`s3/writing.py`). Completion takes no condition: the object is
checked just before, and another writer's object that appears in between is overwritten.

Invariants. (1) Only the generation that we made is called ours. (2) Nothing is retried here. (3) No error of a look
that follows a write leaves as one of the write, which was done.
"""

from __future__ import annotations

import base64
import functools
import json
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

import msgspec

from forebay.backends import errors
from forebay.backends.http.requests import Answer, Wire, bare_etag, version_of
from forebay.backends.s3.contents import parse_time
from forebay.backends.s3.writing import GOOGLE, META, S3Writes, check_size, keeping_sent
from forebay.backends.seam import Body
from forebay.core.errors import ForebayError, Invalid, NotFound, NotSupported, Precondition, Unavailable
from forebay.core.s3rules.keeping import without_keeping
from forebay.core.types import Headers, ObjectInfo
from forebay.ports.chance import Chance

REWRITES_MAX = 1000  # one moves at least a gigabyte between classes of storage, and all of it within one
_RESOURCE = {
    "content-type": "contentType",
    "content-encoding": "contentEncoding",
    "content-language": "contentLanguage",
    "content-disposition": "contentDisposition",
    "cache-control": "cacheControl",
}
Query = list[tuple[str, str]]


class GoogleWrites(S3Writes):
    """The writing half of a bucket. Keys are those of the bucket behind, prefix included."""

    def __init__(self, wire: Wire, api: Wire, chance: Chance, keeping: Headers = ()) -> None:
        """`wire` leads to the bucket (XML API), `api` to the service's root (JSON API)."""
        super().__init__(wire, GOOGLE, keeping=keeping)
        self._api, self._chance = api, chance

    async def put(self, key: str, body: Body, headers: Headers, expect: str | None, tags: str) -> ObjectInfo:
        """See `Backend.put`."""
        what = self._what(key)
        if tags:
            raise NotSupported(f"{what}: Google has no tags on objects: leave them out, or use user metadata")
        check_size(body.size_bytes, what)
        resource = {"name": key, **self._resource(headers, what)}
        if body.md5:
            resource["md5Hash"] = base64.b64encode(bytes.fromhex(body.md5)).decode()
        query = [("uploadType", "multipart"), *await self._generation(key, expect, "ifGenerationMatch")]
        mark = f"forebay-{self._chance.token_hex(16)}"
        kind = dict(headers).get("content-type", "application/octet-stream")
        described = json.dumps(resource).encode()
        before = (
            f"--{mark}\r\ncontent-type: application/json; charset=UTF-8\r\n\r\n".encode()
            + described
            + f"\r\n--{mark}\r\ncontent-type: {kind}\r\n\r\n".encode()
        )
        answer = await self._api.tell(
            "POST",
            "",
            path=f"/upload/storage/v1/b/{self._wire.bucket}/o",
            query=query,
            headers={"content-type": f"multipart/related; boundary={mark}"},
            body=body._replace(md5=""),
            around=(before, f"\r\n--{mark}--\r\n".encode()),
        )
        made = self._read(answer, what, expect)
        return await self._described(key, made, body.size_bytes, headers)

    async def delete(self, key: str, expect: str | None) -> None:
        """See `Backend.delete`."""
        query = await self._generation(key, expect, "ifGenerationMatch")
        answer = await self._api.tell("DELETE", "", path=self._path(key), query=query)
        gone = answer.status == 404 and b"bucket does not exist" not in answer.body
        if answer.status not in (200, 204) and not (gone and not expect):
            raise self._refused(answer, self._what(key), expect)

    async def copy(self, source_key: str, key: str, source_version: str, headers: Headers | None) -> ObjectInfo:
        """See `Backend.copy`."""
        what = self._what(key)
        if headers is None and self._keeping:
            raise NotSupported(f"{what}: Google takes a class of storage with all metadata alone: read it and put it")
        resource = self._resource(headers, what) if headers is not None else None
        data = b"" if resource is None else json.dumps(resource).encode()
        path = f"{self._path(source_key)}/rewriteTo/b/{self._wire.bucket}/o/{quote(key, safe='')}"
        condition = await self._generation(source_key, source_version or None, "ifSourceGenerationMatch")
        query: Query = []
        for _ in range(REWRITES_MAX):
            answer = await self._api.tell(
                "POST",
                "",
                path=path,
                query=[*condition, *query],
                headers={"content-type": "application/json"},
                body=Body(len(data), data),
            )
            if answer.status == 404 and b"bucket does not exist" not in answer.body:
                raise errors.no_such_key(self._what(source_key))
            said = self._read(answer, self._what(source_key), source_version or None)
            if said.get("done"):
                made = said.get("resource") or {}
                return await self._described(key, made, int(made.get("size", 0)), headers or ())
            query = [("rewriteToken", str(said.get("rewriteToken", "")))]
        raise Unavailable(f"{what}: the copy does not end: read the source and put it")

    def close(self) -> None:
        self._api.close()

    async def _condition(self, key: str, expect: str | None) -> dict[str, str]:
        """For completions, which know none: looked at now."""
        if expect == "" and await self._look_if_there(key) is not None:
            raise errors.exists(self._what(key))
        if expect:
            await self._generation(key, expect, "")
        return {}

    async def _generation(self, key: str, expect: str | None, name: str) -> Query:
        """The condition `name` on the generation that has version `expect`; none for None."""
        if expect is None:
            return []
        if expect == "":
            return [(name, "0")]
        now = await self._look_if_there(key)
        if now is None or now[0].version != expect:
            raise errors.changed(self._what(key))
        return [(name, now[1])]

    async def _look_if_there(self, key: str) -> tuple[ObjectInfo, str] | None:
        """The object and its generation."""
        what = self._what(key)
        answer = await self._wire.run(functools.partial(self._wire.ask, [], method="HEAD", key=key))
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise errors.from_status(answer.status, "", what, answer.headers)
        etag, date = answer.headers.get("etag", ""), answer.headers.get("last-modified", "")
        modified_s = parsedate_to_datetime(date).timestamp() if date else 0.0
        size = int(answer.headers.get("content-length", 0))
        info = ObjectInfo(key, size, version_of(etag, modified_s, size), bare_etag(etag), modified_s)
        return info, answer.headers.get("x-goog-generation", "")

    async def _described(self, key: str, made: dict[str, Any], size_bytes: int, headers: Headers) -> ObjectInfo:
        """What the JSON API made, under the ETag that readers see; replaced already, under one that none sees."""
        try:
            now = await self._look_if_there(key)
        except ForebayError as error:
            raise errors.not_described(error, self._what(key)) from error
        generation = str(made.get("generation"))
        if now is not None and now[1] == generation:
            return msgspec.structs.replace(now[0], headers=headers)
        etag = f"generation-{generation}"
        return ObjectInfo(key, size_bytes, f'"{etag}"', etag, parse_time(str(made.get("updated", ""))), headers)

    def _resource(self, headers: Headers, what: str) -> dict[str, Any]:
        """What the JSON API is told of an object."""
        resource = _resource(without_keeping(headers), what)
        for _, value in keeping_sent(self._keeping, headers, GOOGLE.keeping, what):
            resource["storageClass"] = value
        return resource

    def _path(self, key: str) -> str:
        return f"/storage/v1/b/{self._wire.bucket}/o/{quote(key, safe='')}"

    def _read(self, answer: Answer, what: str, expect: str | None) -> dict[str, Any]:
        if answer.status != 200:
            raise self._refused(answer, what, expect)
        try:
            said = json.loads(answer.body)
        except ValueError as error:
            raise Unavailable(f"{what}: the answer is not JSON ({error}): check the endpoint") from error
        if not isinstance(said, dict):
            raise Unavailable(f"{what}: the answer is not an object: check the endpoint")
        return said

    def _refused(self, answer: Answer, what: str, expect: str | None) -> Exception:
        text = answer.body.decode(errors="replace")
        failed = errors.from_status(answer.status, text, what, answer.headers, wrote=True)
        if isinstance(failed, NotFound):
            return errors.changed(what) if expect else errors.no_such_bucket(self._wire.url)
        if isinstance(failed, Precondition) and expect == "":
            return errors.exists(what)
        return failed


def _resource(headers: Headers, what: str) -> dict[str, Any]:
    """Stored headers as the JSON API names them."""
    resource: dict[str, Any] = {}
    metadata = {}
    for name, value in headers:
        if name in _RESOURCE:
            resource[_RESOURCE[name]] = value
        elif name.startswith(META):
            metadata[name.removeprefix(META)] = value
        elif name == "expires":
            raise NotSupported(f"{what}: Google keeps no Expires: use Cache-Control")
        else:
            raise Invalid(f"{what}: header {name!r} cannot be stored: use x-amz-meta-… for your own")
    if metadata:
        resource["metadata"] = metadata
    return resource
