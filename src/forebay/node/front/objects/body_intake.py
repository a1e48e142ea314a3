"""From a request's headers to a sink for its body: its length, its framing, and its promised checksums.

Theory. Everything that can be refused before the body is refused here, so that a client that asks `Expect:
100-continue` sends nothing in vain: no length, too long a length, an impossible checksum, a payload form that cannot be
checked, no room. `bodies.Wanted` lists what can be judged only with the bytes.

A node without identities ignores signatures, also those of chunks. It still compares a SHA-256 given for the whole
body, since that protects the bytes and not the door.

A body is unframed if its payload form says that it is framed (`STREAMING-…`), or if its decoded length is given.
`Content-Encoding: aws-chunked` alone means nothing: clients that let their users set the header send it with plain
bytes, and S3 accepts them.

A body in HTTP's own chunks need not give its length. S3 refuses it, other stores accept it, and its end is
unmistakable. It is bounded like all others.

Invariant. A body that is longer than announced is never taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from forebay.core import limits
from forebay.core.errors import Invalid
from forebay.core.s3rules.chunked import AwsChunked
from forebay.core.s3rules.signedbody import CHUNKS, CHUNKS_TRAILER, UNSIGNED, ChunkVerifier, check_payload_form
from forebay.core.types import Bucket
from forebay.node.front.http.auth import Caller
from forebay.node.front.http.bodies import Incoming, Wanted
from forebay.node.front.http.checksums import ALGORITHM_OF, check_algorithm, check_value, content_md5
from forebay.node.front.http.requests import Request

_PREFIX: Final = b"x-amz-checksum-"
_NO_CHECKSUMS: Final = frozenset((b"x-amz-checksum-algorithm", b"x-amz-checksum-mode", b"x-amz-checksum-type"))


class Intake:
    """`place` gives the path of a new file on the volume of (bucket, key), "" where there is none."""

    def __init__(self, place: Callable[[str, str], str]) -> None:
        self._place = place

    def open(
        self,
        request: Request,
        caller: Caller | None,
        bucket: Bucket,
        key: str,
        *,
        md5: bool = False,
        hash128: bool = False,
        algorithms: tuple[str, ...] = (),
        bytes_max: int = limits.PUT_BYTES_MAX,
        measured: bool = True,
    ) -> Incoming:
        """A sink for the bytes of an object or part. `md5`, `hash128` and `algorithms` are computed whatever the client
        promised; of a body up to ETAG_MD5_BYTES_MAX the MD5 instead of `hash128`. Not `measured`: nobody says how
        long they are (the file of a form); `bytes_max` bounds them. `Invalid` with S3's code for what is wrong;
        `Unavailable` (`InsufficientStorage`)."""
        wanted, chunked, size_bytes = _understand(
            request, caller, md5=md5, hash128=hash128, algorithms=algorithms, measured=measured
        )
        if size_bytes is None:
            if measured and b"transfer-encoding" not in request.headers:
                raise Invalid("You must provide the Content-Length HTTP header.", code="MissingContentLength")
            return Incoming(wanted, None, place=lambda: self._place(bucket.name, key), bytes_max=bytes_max)
        if size_bytes > bytes_max:
            raise Invalid(
                f"Your proposed upload exceeds the maximum allowed size of {bytes_max} bytes: use a multipart upload",
                code="EntityTooLarge",
            )
        return Incoming(wanted, size_bytes, place=lambda: self._place(bucket.name, key), chunked=chunked)

    def document(self, request: Request, caller: Caller | None, bytes_max: int = limits.XML_BODY_BYTES_MAX) -> Incoming:
        """A sink for a small document: when it is whole and right it is `request.body`."""
        wanted, chunked, size_bytes = _understand(request, caller)
        if size_bytes is not None and size_bytes > bytes_max:
            raise Invalid(f"the document is longer than {bytes_max} bytes: send less", code="EntityTooLarge")
        return Incoming(
            wanted, size_bytes, place=None, bytes_max=bytes_max, memory_bytes_max=bytes_max, chunked=chunked
        )


def _understand(
    request: Request,
    caller: Caller | None,
    *,
    md5: bool = False,
    hash128: bool = False,
    algorithms: tuple[str, ...] = (),
    measured: bool = True,
) -> tuple[Wanted, AwsChunked | None, int | None]:
    """What is promised of the body, what takes its framing off, and how long it is without. Of one that is short, or
    may be, the MD5 is wanted in place of `hash128`."""
    headers = request.headers
    verified = caller.verified if caller is not None else None
    payload = verified.payload if verified is not None else headers.get(b"x-amz-content-sha256", UNSIGNED)
    check_payload_form(payload)
    streaming = payload.startswith(b"STREAMING-")
    chunked = None
    if streaming or (b"x-amz-decoded-content-length" in headers and _is_aws_chunked(headers)):
        signed = verified is not None and payload in (CHUNKS, CHUNKS_TRAILER)
        verifier = ChunkVerifier(verified) if signed and verified is not None else None
        chunked = AwsChunked(verifier, signed_trailer=payload == CHUNKS_TRAILER)
    promised = promised_checksums(request)
    trailer = _trailer(headers.get(b"x-amz-trailer", b""), promised, chunked is not None)
    named = headers.get(b"x-amz-sdk-checksum-algorithm", b"").decode("latin-1")
    if named and check_algorithm(named) not in (*promised, trailer) and b"content-md5" not in headers:
        raise Invalid(
            "x-amz-sdk-checksum-algorithm specified, but no corresponding x-amz-checksum-* or x-amz-trailer "
            "headers were found.",
            code="InvalidRequest",
        )
    md5_promised = content_md5(headers[b"content-md5"]) if b"content-md5" in headers else ""
    size_bytes = _length(request, chunked is not None) if measured else None
    if hash128 and (size_bytes is None or size_bytes <= limits.ETAG_MD5_BYTES_MAX):
        md5, hash128 = True, False
    return Wanted(md5, hash128, algorithms, promised, md5_promised, payload, trailer), chunked, size_bytes


def _is_aws_chunked(headers: dict[bytes, bytes]) -> bool:
    codings = headers.get(b"content-encoding", b"").lower().split(b",")
    return b"aws-chunked" in (coding.strip() for coding in codings)


def promised_checksums(request: Request) -> dict[str, str]:
    """The checksum that the headers give for the whole body: at most one, algorithm to base64."""
    found = {}
    for name, value in request.headers.items():
        if name.startswith(_PREFIX) and name not in _NO_CHECKSUMS:
            algorithm = ALGORITHM_OF.get(name.decode("latin-1"))
            if algorithm is None:
                check_algorithm(name[len(_PREFIX) :].decode("latin-1"))
            assert algorithm is not None
            found[algorithm] = check_value(algorithm, value.decode("latin-1"))
    if len(found) > 1:
        raise Invalid(
            "Expecting a single x-amz-checksum- header. Multiple checksum Types are not allowed.", code="InvalidRequest"
        )
    return found


def _trailer(named: bytes, promised: dict[str, str], chunked: bool) -> str:
    """The algorithm that x-amz-trailer announces."""
    if not named:
        return ""
    algorithm = ALGORITHM_OF.get(named.decode("latin-1").strip().lower())
    if algorithm is None:
        raise Invalid("The value specified in the x-amz-trailer header is not supported", code="InvalidRequest")
    if promised or not chunked:
        raise Invalid(
            "x-amz-trailer goes with an aws-chunked body, and with no x-amz-checksum- header", code="InvalidRequest"
        )
    return algorithm


def _length(request: Request, chunked: bool) -> int | None:
    """How many bytes the body has without its framing; None where nothing says it."""
    headers = request.headers
    length = int(headers[b"content-length"]) if b"content-length" in headers else None  # the parser saw digits
    if not chunked:
        if length is None and b"transfer-encoding" not in headers:
            return 0 if request.method != b"PUT" else None
        return length
    decoded = headers.get(b"x-amz-decoded-content-length")
    if decoded is None:
        raise Invalid(
            "You must provide the x-amz-decoded-content-length HTTP header with an aws-chunked body.",
            code="MissingContentLength",
        )
    if not decoded.isdigit() or len(decoded) > 19:
        raise Invalid("x-amz-decoded-content-length is not a number", code="InvalidArgument")
    if length is not None and int(decoded) > length:
        raise Invalid("x-amz-decoded-content-length is more than Content-Length", code="InvalidRequest")
    return int(decoded)
