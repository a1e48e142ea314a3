"""The fake front with buckets that have settings: an engine that makes, changes and forgets them, and tags objects."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from forebay.core.access import Identity, encode_identities, parse_grants
from forebay.core.errors import Exists, NotFound
from forebay.core.messages.calls import (
    BucketNamed,
    BucketRulesCall,
    Nothing,
    ObjectNamed,
    ObjectState,
    StatCall,
    TagCall,
    TagsSaid,
)
from forebay.core.s3rules.names import BASE_DOMAINS, Addressing
from forebay.core.types import Bucket
from forebay.node.front.http.auth import Auth
from forebay.node.front.objects.body_intake import Intake
from forebay.node.front.objects.puts import Puts
from forebay.node.front.s3.operations import S3
from tests.s3.fake_front import MODIFIED_S, Answer, FakeReads, Front, Object


class BucketReads(FakeReads):
    """`front` is what the front was told of buckets, `settings` what the engine knows: tell it with `tell`."""

    def __init__(self, buckets: dict[str, dict[str, Object]]) -> None:
        super().__init__(buckets)
        self.settings = {name: Bucket(name, f"s3://{name}", write="back") for name in buckets}
        self.front: dict[str, Bucket] = dict(self.settings)

    def tell(self) -> None:
        self.front = dict(self.settings)

    def change(self, name: str, **changes: Any) -> None:
        self.settings[name] = msgspec.structs.replace(self.settings[name], **changes)
        self.tell()

    def bucket(self, name: str) -> Bucket:
        return self.front.get(name) or super().bucket(name)

    async def call(self, verb: str, arguments: Any) -> Any:
        serve = getattr(self, f"_{verb}_call", None)
        if serve is None or verb in self.answers:
            return await super().call(verb, arguments)
        self.calls.append((verb, arguments))
        return serve(arguments)

    def _known(self, name: str) -> Bucket:
        if name not in self.settings:
            raise NotFound(f"there is no bucket {name!r}", code="NoSuchBucket")
        return self.settings[name]

    def _buckets_call(self, _: Nothing) -> list[Bucket]:
        return list(self.settings.values())

    def _bucket_create_call(self, bucket: Bucket) -> Bucket:
        if bucket.name in self.settings:
            raise Exists("it is there", code="BucketAlreadyOwnedByYou")
        self.settings[bucket.name] = bucket
        self.buckets[bucket.name] = {}
        self.tell()
        return bucket

    def _bucket_rules_call(self, call: BucketRulesCall) -> Bucket:
        self._known(call.name)
        given: Mapping[str, Any] = {"acl": call.acl, "cors": call.cors}
        self.change(call.name, **{name: value for name, value in given.items() if value is not None})
        return self.settings[call.name]

    def _bucket_delete_call(self, named: BucketNamed) -> Nothing:
        self._known(named.name)
        del self.settings[named.name]
        self.tell()
        return Nothing()

    def _object(self, bucket: str, key: str) -> Object:
        self._known(bucket)
        found = self.buckets[bucket].get(key)
        if found is None:
            raise NotFound("there is no such object", code="NoSuchKey")
        return found

    def _stat_call(self, call: StatCall) -> ObjectState:
        found = self._object(call.bucket, call.key)
        return ObjectState(
            call.bucket, call.key, len(found.data), found.etag, found.etag, MODIFIED_S, 0, False, False, 0.0,
            found.headers,
        )  # fmt: skip

    def _tags_call(self, named: ObjectNamed) -> TagsSaid:
        return TagsSaid(self._object(named.bucket, named.key).tags)

    def _tag_call(self, call: TagCall) -> Nothing:
        self._object(call.bucket, call.key).tags = call.tags
        return Nothing()


class BucketFront(Front):
    """A front over `BucketReads`. Each name in `may` is an identity with the grants that its value lists."""

    reads: BucketReads

    def __init__(self, may: Mapping[str, str] | None = None, **buckets: dict[str, Object]) -> None:
        self.reads = BucketReads(buckets)
        self.auth = Auth(addressing=Addressing((*BASE_DOMAINS, "s3.example.com")))
        identities = [
            Identity(name, f"AKID{name.upper()}", f"secret of {name}", grants=parse_grants(grants) if grants else ())
            for name, grants in (may or {}).items()
        ]
        self.auth.update(encode_identities(identities) if identities else b"")
        puts = Puts(self.reads.call, Intake(self.reads.place), self.reads)
        self.handler = S3(self.reads, self.reads.call, self.auth, puts, "node-1", ("s3.example.com",))

    def ask_as(
        self, name: str, method: str, target: str, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> Answer:
        """The request as the identity `name` signs it."""
        credentials = Credentials(f"AKID{name.upper()}", f"secret of {name}")
        given = {**(headers or {}), "x-amz-content-sha256": hashlib.sha256(body or b"").hexdigest()}
        request = AWSRequest(method, f"http://127.0.0.1:9400{target}", given, data=body)
        S3SigV4Auth(credentials, "s3", "us-east-1").add_auth(request)
        return self.ask(method, target, {**dict(request.headers.items()), "host": "127.0.0.1:9400"}, body)
