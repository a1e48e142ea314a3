"""Whatever a client sends to a running node, numbers above all: an answer that says what is wrong, no fault of ours.

Requests are made from the tables of both APIs, with odd values put where numbers and names stand, and sent to a real
node by somebody who may do everything. A seed makes them again. FOREBAY_FUZZ_S=600 goes on for ten minutes (with `-o
faulthandler_timeout=0 --timeout 0`); FOREBAY_FUZZ_SEED begins with another seed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import random
import re
import socket
import string
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import pytest

from forebay.core.machines.hints import HintsCall
from forebay.core.s3rules.sigv4 import canonical_path, canonical_query, parse_query, signing_key
from forebay.core.types import Bucket
from forebay.node.front.native.routes import ROUTES, Route
from tests.front.fake_engine import Answer, Client
from tests.node.conftest import NodeProcess
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.real
REQUESTS = 400  # of each kind, where nobody asks for more
FUZZ_S = float(os.environ.get("FOREBAY_FUZZ_S", "0"))
SEED = int(os.environ.get("FOREBAY_FUZZ_SEED", "1"))
KEY_ID, SECRET, TOKEN = "AKIDODDREQUESTS", "odd/secret", "odd-token"
BUCKETS = ("odd-dir", "odd-local")

# fmt: off
NUMBERS = [
    "-1", "-0", "0", "1", "+5", " 7", "7 ", "1.5", "1e9", "1E400", "-1e400", "1_000", "0x10", "NaN", "nan", "Infinity",
    "-inf", "9" * 18, "9" * 19, "9" * 20, "9" * 400, "9" * 5000, "18446744073709551616", "9223372036854775808",
    "2147483648", "10001", "\u0663", "\uff19", "\u00b2", "\u00bd", "1\u0663", "", "x", "1;2", "1,2", "\u2212" + "1",
    "00000000000000000000001", "1234567890abc",
]
JSON_NUMBERS = [
    "-1", "-0", "0", "1", "1.5", "1e9", "1e400", "-1e400", "1e308", "5e-324", "9" * 19, "9" * 20, "9" * 400,
    "18446744073709551615", "18446744073709551616", "9223372036854775807", "9223372036854775808",
    "-9223372036854775809", "NaN", "Infinity", "null", "true", '"1"', '"NaN"', "[]", "{}", "[1]",
]
JSON_TEXTS = [
    '""', '"\\ud800"', '"\\u0000"', '"a\\nb"', '"' + "x" * 3000 + '"', "1", "null", "[]", '"\u0663"', '"../.."',
    '"NaN"', '"-1"',
]
S3_HEADERS = [
    "range", "if-range", "if-modified-since", "if-unmodified-since", "x-amz-max-parts", "x-amz-part-number-marker",
    "x-amz-mp-object-size", "x-amz-decoded-content-length", "x-amz-if-match-size", "x-amz-if-match-last-modified-time",
    "x-amz-copy-source-range", "content-md5", "x-amz-checksum-crc32", "x-amz-checksum-sha256", "if-match",
    "x-amz-copy-source-if-modified-since", "x-amz-object-attributes", "x-amz-checksum-type", "x-amz-tagging",
    "access-control-request-method", "origin", "x-amz-trailer", "x-amz-sdk-checksum-algorithm", "content-encoding",
    "x-amz-bucket-object-lock-enabled", "x-amz-acl", "x-amz-checksum-algorithm", "expect", "x-amz-storage-class",
]
S3_SHAPES = [  # a number goes where {} is
    ("GET", "/{b}/k", ["partNumber={}", "response-expires={}", "versionId={}", "attributes", ""]),
    ("HEAD", "/{b}/k", ["partNumber={}", ""]),
    ("GET", "/{b}", ["max-keys={}", "list-type={}", "list-type=2&max-keys={}", "uploads&max-uploads={}",
                     "versions&max-keys={}", "list-type=2&continuation-token={}", "location", "acl", "cors",
                     "uploads&upload-id-marker={}&key-marker=k"]),
    ("GET", "/", ["max-buckets={}", "continuation-token={}", "prefix={}"]),
    ("GET", "/{b}/k", ["uploadId={}", "uploadId=x&max-parts={}", "uploadId=x&part-number-marker={}", "tagging", "acl"]),
    ("PUT", "/{b}/new", ["", "partNumber={}&uploadId=x", "partNumber=1&uploadId={}", "tagging", "acl", "uploadId=x"]),
    ("POST", "/{b}/new", ["uploads", "uploadId={}", "restore", "select&select-type={}"]),
    ("POST", "/{b}", ["delete", "uploads", ""]),
    ("DELETE", "/{b}/new", ["", "uploadId={}", "versionId={}"]),
    ("PUT", "/{b}", ["cors", "acl", "tagging", "versioning"]),
    ("PUT", "/odd-new-{}", [""]),
    ("OPTIONS", "/{b}/k", [""]),
]
XML_BODIES = [
    "<Delete><Object><Key>new</Key><Size>{}</Size></Object></Delete>",
    "<Delete><Object><Key>new</Key><LastModifiedTime>{}</LastModifiedTime></Object></Delete>",
    "<Delete><Object><Key>{}</Key></Object></Delete>",
    "<CompleteMultipartUpload><Part><PartNumber>{}</PartNumber><ETag>x</ETag></Part></CompleteMultipartUpload>",
    ("<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>{}</ETag><ChecksumCRC32>{}</ChecksumCRC32></Part>"
     "</CompleteMultipartUpload>"),
    ("<CORSConfiguration><CORSRule><AllowedOrigin>*</AllowedOrigin><AllowedMethod>GET</AllowedMethod>"
     "<MaxAgeSeconds>{}</MaxAgeSeconds></CORSRule></CORSConfiguration>"),
    "<Tagging><TagSet><Tag><Key>{}</Key><Value>{}</Value></Tag></TagSet></Tagging>",
    "<CreateBucketConfiguration><LocationConstraint>{}</LocationConstraint></CreateBucketConfiguration>",
    ("<AccessControlPolicy><Owner><ID>{}</ID></Owner><AccessControlList><Grant><Grantee xsi:type='{}'><ID>x</ID>"
     "</Grantee><Permission>READ</Permission></Grant></AccessControlList></AccessControlPolicy>"),
    "{}", "", "<", "<Delete/>", "<!DOCTYPE x [<!ENTITY a 'b'>]><Delete/>",
]
HEAD_PIECES = [
    b"GET ", b"PUT ", b"/odd-dir/k", b"/-/v1/status", b" HTTP/1.1", b" HTTP/1.", b"\r\n", b"\r\n\r\n", b"\n", b"\r",
    b"Host: localhost", b"Content-Length: ", b"Transfer-Encoding: chunked", b"Range: bytes=", b"Expect: 100-continue",
    b"Authorization: ", b"\0", b"\xff", b"%", b"?", b"x" * 3000, b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"-1\r\n",
    b" ", b":", b"1_0\r\n",
]
# fmt: on


@pytest.fixture(scope="module")
def odd_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node that knows one identity, which may do everything."""
    root = tmp_path_factory.mktemp("odd")
    (root / "bucket").mkdir()
    for name in ("k", "kept"):
        (root / "bucket" / name).write_bytes(b"some bytes")
    identity = {
        "name": "odd", "allow": "admin:*", "access_key_id": KEY_ID, "secret_access_key": SECRET,
        "token_sha256": hashlib.sha256(TOKEN.encode()).hexdigest(),
    }  # fmt: skip
    (root / "identities.json").write_text(json.dumps({"identities": [identity]}))
    node = NodeProcess(root / "node", "--fronts", "1", "--identities", str(root / "identities.json"))
    node.start()
    told = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    for name, url, write in ((BUCKETS[0], f"file://{root}/bucket", "through"), (BUCKETS[1], "local://", "local")):
        body = json.dumps({"name": name, "url": url, "write": write}).encode()
        status, said = node.ask("PUT", f"/-/v1/buckets/{name}", told, body)
        assert status < 300, said
    yield node
    node.stop()


class Asking:
    """Requests as a client of the node makes them, signed or with a token, over one connection while it lasts."""

    def __init__(self, node: NodeProcess, chance: random.Random) -> None:
        url = urlsplit(node.endpoint)
        self.chance, self._node = chance, node
        self._address = (url.hostname or "", url.port or 0)
        self.client: Client | None = None
        self.sent = b""

    def send(self, data: bytes) -> Answer | None:
        """The answer to what is said on the connection; None where the node waits for more, or ended it."""
        self.sent = data
        if self.client is None:
            self.client = Client(socket.create_connection(self._address, timeout=PATIENCE_S))
        answer = None
        try:
            self.client.send(data)
            answer = self.client.answer(data.partition(b" ")[0].decode("latin-1"))
            while answer.status == 100:
                answer = self.client.answer(data.partition(b" ")[0].decode("latin-1"))
        except (EOFError, ConnectionError):
            self.hang_up()
        if answer is not None and answer.headers.get("connection") == "close":
            self.hang_up()
        return answer

    def hang_up(self) -> None:
        if self.client is not None:
            self.client.sock.close()
            self.client = None

    def native(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer | None:
        return self._ask(method, target, {"Authorization": f"Bearer {TOKEN}", **headers}, body)

    def signed(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer | None:
        """As an SDK signs: every header, and the body."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path, _, query = target.encode().partition(b"?")
        payload = hashlib.sha256(body).hexdigest() if self.chance.random() < 0.7 else "UNSIGNED-PAYLOAD"
        sent = {"host": "localhost", "x-amz-date": stamp, "x-amz-content-sha256": payload}
        sent |= {name: value for name, value in headers.items() if name != "expect"}
        names = sorted(sent)
        lines = b"".join(
            name.encode() + b":" + b" ".join(sent[name].encode().strip(b" \t").split(b" ")) + b"\n" for name in names
        )
        canonical = b"\n".join((
            method.encode(), canonical_path(path), canonical_query(parse_query(query)), lines, ";".join(names).encode(),
            payload.encode(),
        ))  # fmt: skip
        scope = f"{stamp[:8]}/us-east-1/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical).hexdigest()}".encode()
        signature = hmac.digest(signing_key(SECRET, stamp[:8].encode(), b"us-east-1"), text, "sha256").hex()
        signer = f"Credential={KEY_ID}/{scope}, SignedHeaders={';'.join(names)}, Signature={signature}"
        sent["authorization"] = f"AWS4-HMAC-SHA256 {signer}"
        return self._ask(method, target, sent | headers, body)

    def _ask(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer | None:
        fields = {"host": "localhost", **{name.lower(): value for name, value in headers.items()}}
        if body or method in ("PUT", "POST"):
            fields.setdefault("content-length", str(len(body)))
        lines = [f"{method} {target} HTTP/1.1".encode()]
        lines += [name.encode() + b": " + value.encode() for name, value in fields.items()]
        return self.send(b"\r\n".join([*lines, b"", b""]) + body)


def judge(asking: Asking, answer: Answer | None) -> None:
    """Each answer is one that our APIs may give; a refusal says why. (501 is what is not served.)"""
    if answer is None:
        return
    told = f"{answer.status} {answer.body[:400]!r} to {asking.sent[:1500]!r}"
    # What is no archive, and a backend that is not there, are nobody's mistake in this request.
    known = b'"Corrupt"' in answer.body or b'"NoBackendBucket"' in answer.body or b"member=" in asking.sent
    assert answer.status < 500 or answer.status in (501, 505) or (answer.status in (502, 503) and known), told
    if answer.status >= 400 and not asking.sent.startswith(b"HEAD"):
        assert len(answer.body) > 20, told


def repeat(node: NodeProcess, one: Callable[[Asking], None]) -> None:
    """Do `one` many times, each with chance of its own, and then see that the node is well."""
    ends_s = time.monotonic() + FUZZ_S / 3
    number = 0
    pids = node.children()
    while number < REQUESTS if not FUZZ_S else time.monotonic() < ends_s:
        asking = Asking(node, random.Random(f"{SEED}-{one.__name__}-{number}"))
        try:
            for _ in range(20):
                one(asking)
        except BaseException as error:
            error.add_note(f"seed {SEED}, {one.__name__} {number}: {asking.sent[:3000]!r}")
            raise
        finally:
            asking.hang_up()
        number += 20
    assert node.children() == pids, "a process ended"
    assert "a bug while" not in node.log, node.log[-3000:]
    assert "Traceback" not in node.log, node.log[-3000:]
    asking = Asking(node, random.Random(0))
    answer = asking.signed("GET", f"/{BUCKETS[0]}/kept", {}, b"")
    asking.hang_up()
    assert answer is not None
    assert answer.body == b"some bytes"


# --- S3 ---------------------------------------------------------------------------------------------------------------
def header_value(chance: random.Random, name: str) -> str:
    number = chance.choice(NUMBERS)
    if "range" in name and chance.random() < 0.7:
        return f"bytes={number}-{chance.choice(NUMBERS)}"
    if "since" in name and chance.random() < 0.7:
        return f"Tue, {number} Nov {chance.choice(NUMBERS)} 12:45:26 GMT"
    if name == "x-amz-object-attributes" and chance.random() < 0.7:
        return "ObjectParts,ObjectSize"
    if name == "expect":
        return "100-continue"
    return number


def s3_request(asking: Asking) -> None:
    chance = asking.chance
    method, path, queries = chance.choice(S3_SHAPES)
    query = chance.choice(queries).replace("{}", quote(chance.choice(NUMBERS)))
    target = path.replace("{b}", chance.choice(BUCKETS)).replace("{}", quote(chance.choice(NUMBERS)[:40]))
    names = chance.sample(S3_HEADERS, chance.choice((0, 1, 1, 2)))
    headers = {name: header_value(chance, name).replace("\n", "") for name in names}
    body = b""
    if method in ("PUT", "POST") or chance.random() < 0.1:
        text = chance.choice(XML_BODIES)
        while "{}" in text:
            text = text.replace("{}", chance.choice(NUMBERS), 1)
        body = text.encode()
    if chance.random() < 0.1:
        headers["x-amz-copy-source"] = f"{chance.choice(BUCKETS)}/k"
    judge(asking, asking.signed(method, f"{target}?{query}" if query else target, headers, body))


def test_odd_numbers_in_signed_requests(odd_node: NodeProcess) -> None:
    repeat(odd_node, s3_request)


# --- the native API ---------------------------------------------------------------------------------------------------
def sample(chance: random.Random, type_: Any) -> str:
    """JSON of a value of `type_`, with odd values put in here and there."""
    schema = msgspec.json.schema(type_)
    return _sample(chance, schema, schema.get("$defs", {}))


def _sample(chance: random.Random, schema: dict[str, Any], defs: dict[str, Any], name: str = "") -> str:
    if chance.random() < 0.03:
        return chance.choice(JSON_NUMBERS + JSON_TEXTS)
    if "$ref" in schema:
        return _sample(chance, defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        return _sample(chance, chance.choice(schema["anyOf"]), defs, name)
    if "enum" in schema:
        return json.dumps(chance.choice(schema["enum"]))
    kind = schema.get("type")
    if kind == "object":
        fields = [
            f"{json.dumps(field)}: {_sample(chance, inner, defs, field)}"
            for field, inner in schema.get("properties", {}).items()
            if field in schema.get("required", ()) or chance.random() < 0.5
        ]
        return "{" + ", ".join(fields) + "}"
    if kind == "array":
        inner = schema.get("prefixItems") or [schema.get("items") or {}] * chance.choice((0, 1, 2))
        return "[" + ", ".join(_sample(chance, part, defs) for part in inner) + "]"
    if kind in ("integer", "number"):
        return chance.choice(JSON_NUMBERS)
    if kind == "boolean":
        return chance.choice(("true", "false"))
    if schema.get("contentEncoding") == "base64":
        return json.dumps(base64.b64encode(chance.randbytes(chance.choice((0, 1, 12, 24)))).decode())
    if "bucket" in name or name == "name":
        return json.dumps(chance.choice((*BUCKETS, "odd-absent")))
    if "url" in name:
        return json.dumps(chance.choice(("memory://", "local://", "local://x", "file:///nowhere", "http://[", "s3://")))
    return json.dumps(chance.choice(("", "k", "new", "a/b", "0")))


def native_request(asking: Asking) -> None:
    chance = asking.chance
    route: Route = chance.choice(ROUTES)
    name = chance.choice(BUCKETS)
    if route.body is Bucket or route.name == "bucket_delete":
        name = "odd-made"
    path = route.path.replace("{bucket}", name).replace("{key}", chance.choice(("k", "new")))
    path = path.replace("{job}", quote(chance.choice((*NUMBERS, "job")), safe="")[:200] or "j")
    names = [parameter.name for parameter in route.query]
    query = "&".join(f"{name}={quote(chance.choice(NUMBERS))}" for name in names if chance.random() < 0.5)
    headers = {}
    if chance.random() < 0.3:
        field = chance.choice(S3_HEADERS)
        headers[field] = header_value(chance, field)
    body = b""
    if route.body is bytes:
        body = b"some bytes"
    elif route.body is not None:
        body = sample(chance, route.body).encode()
        if route.body is HintsCall:
            body = re.sub(rb'"job": "[^"]*"', b'"job": "job"', body)
            path = "/-/v1/hints/job"
        if route.body is Bucket:
            body = body.replace(b'"odd-absent"', b'"odd-made"').replace(b'"odd-dir"', b'"odd-made"')
            body = body.replace(b'"odd-local"', b'"odd-made"')
    judge(asking, asking.native(route.method, f"{path}?{query}" if query else path, headers, body))


def test_odd_numbers_in_native_requests(odd_node: NodeProcess) -> None:
    repeat(odd_node, native_request)


# --- HTTP -------------------------------------------------------------------------------------------------------------
def raw_request(asking: Asking) -> None:
    chance = asking.chance
    if chance.random() < 0.5:
        data = b"".join(
            chance.choice((chance.choice(HEAD_PIECES), chance.choice(NUMBERS).encode()))
            for _ in range(chance.randrange(14))
        )
    else:
        framing = chance.choice((b"Content-Length: ", b"Transfer-Encoding: ")) + chance.choice(
            [number.encode() for number in NUMBERS] + [b"chunked", b"chunked, chunked", b"gzip"]
        )
        chunks = b"".join(
            chance.choice([number.encode() for number in NUMBERS] + [b"4", b"0", b"4;a=b"])
            + chance.choice((b"\r\n", b"\n"))
            + chance.choice((b"data\r\n", b"", b"\r\n"))
            for _ in range(chance.randrange(5))
        )
        data = b"%s /%s HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n%s" % (
            chance.choice((b"GET", b"PUT", b"POST", b"DELETE", b"OPTIONS")),
            chance.choice((b"odd-dir/new", b"odd-dir", b"-/v1/batch", b"-/v1/objects/odd-dir/new", b"-/healthz", b"")),
            framing,
            chunks,
        )
    asking.hang_up()
    asking.sent = data
    with socket.create_connection(asking._address, timeout=PATIENCE_S) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)  # nothing more comes: the node answers what it can, and ends
        said = Client(sock).rest()
    for line in said.split(b"\r\n"):
        if line.startswith(b"HTTP/1.1 5"):
            assert line.split(b" ")[1] in (b"501", b"505"), (said[:600], data[:1500])


def test_odd_bytes_on_a_connection(odd_node: NodeProcess) -> None:
    repeat(odd_node, raw_request)


def test_the_same_seed_makes_the_same_requests() -> None:
    assert sample(random.Random(3), Bucket) == sample(random.Random(3), Bucket)
    assert set(string.digits) & set("".join(NUMBERS))
