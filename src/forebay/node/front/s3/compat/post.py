"""POST Object: a browser's form upload.

Theory. The fields come first and the file last. So when the file begins, everything that decides is known: who signed,
what the policy allows, where the file goes and with what headers. Only then is room made for it, and its bytes go the
way of any other body (`puts.py`). A field that S3 knows as a header becomes one (`_headers_of`), so the same rules
judge a form and a PUT.

The form chooses the answer: a status, or a redirect to a page with what was stored in its query.

Rejected: checking the policy when the form is whole (gigabytes would have been received for nothing).

Invariants. (1) No byte of the file is kept before the caller was found to be allowed to write. (2) After an error or
`abort`, nothing of the file is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from urllib.parse import quote, urlsplit

from forebay.core import limits
from forebay.core.errors import Invalid, NotSupported
from forebay.core.s3rules.compat import postpolicy
from forebay.core.s3rules.compat.forms import Field, FileStarts, FormParser, parse_boundary
from forebay.core.s3rules.compat.postpolicy import Policy
from forebay.core.s3rules.tags import HEADER as TAGGING
from forebay.core.s3rules.tags import format_tags
from forebay.core.types import Bucket, check_key
from forebay.node.front.http.auth import Auth
from forebay.node.front.http.bodies import Incoming
from forebay.node.front.http.checksums import HEADERS
from forebay.node.front.http.requests import BodySink, Exchange, Lines, Request, header_line
from forebay.node.front.objects.puts import Puts
from forebay.node.front.s3.compat.tagging import read_tags
from forebay.node.front.s3.xml import CONTENT_TYPE, document, element

_CONTENT: Final = ("content-type", "cache-control", "content-disposition", "content-encoding", "expires")
_STATUSES: Final = {"200": 200, "201": 201, "204": 204}
_SIGNING: Final = ("x-amz-algorithm", "x-amz-credential", "x-amz-date", "x-amz-security-token", "x-amz-signature")
_UNSERVED: Final = ("x-amz-website-redirect-location",)


class Form:
    """The sink of one form: see the module's header. `begin` gives the place for the file once the fields are known."""

    large = False  # its file begins on the loop

    @property
    def proved(self) -> bool:
        """Its policy is there and was signed by somebody who may."""
        return self.incoming is not None

    def __init__(self, boundary: bytes, begin: Callable[[Form], Incoming]) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.key = ""
        self.policy: Policy | None = None
        self.incoming: Incoming | None = None
        self._parser = FormParser(boundary)
        self._begin = begin
        self._size_bytes = 0
        self._whole = False

    def write(self, chunk: bytes | memoryview) -> None:
        """Take the next bytes of the form."""
        for event in self._parser.feed(bytes(chunk)):
            if isinstance(event, bytes):
                assert self.incoming is not None
                self._size_bytes += len(event)
                self._check_size(complete=False)
                self.incoming.write(event)
            elif isinstance(event, Field):
                self._add(event)
            elif isinstance(event, FileStarts):
                self.filename = event.filename
                self.incoming = self._begin(self)
            else:
                self._check_size(complete=True)

    def wrote(self) -> None:
        if self.incoming is not None:
            self.incoming.wrote()

    def finish(self) -> bytes:
        """The form is whole: so is its file."""
        try:
            self._parser.finish()
        except Invalid:
            self.abort()
            raise
        assert self.incoming is not None
        self.incoming.finish()
        return b""

    def abort(self) -> None:
        """Remove what came of the file."""
        if self.incoming is not None:
            self.incoming.abort()

    def _add(self, field: Field) -> None:
        if field.name in self.fields:
            raise Invalid(f"the field {field.name[:60]!r} is there twice: send it once", code="InvalidArgument")
        self.fields[field.name] = field.value

    def _check_size(self, *, complete: bool) -> None:
        if self.policy is not None:
            postpolicy.check_size(self.policy, self._size_bytes, complete=complete)


class Forms:
    """Takes forms: see the module's header. `lines` are the first header lines of each answer."""

    def __init__(self, auth: Auth, puts: Puts, lines: Lines) -> None:
        self._auth = auth
        self._puts = puts
        self._lines = lines

    def take(self, request: Request, bucket: Bucket) -> BodySink:
        """A sink for the form that `request` announces. `Invalid` (`MalformedPOSTRequest`)."""
        boundary = parse_boundary(request.header(b"content-type"))
        return Form(boundary, lambda form: self._begin(form, request, bucket))

    def handle(self, request: Request, exchange: Exchange, bucket: Bucket) -> None:
        """Make the file of the whole form the object, and answer."""
        form = request.sink
        assert isinstance(form, Form)
        assert form.incoming is not None
        putting = self._puts.put(bucket.name, form.key, form.incoming)

        async def answer() -> None:
            self._answer(request, exchange, bucket, form, (await putting).etag)

        exchange.spawn(answer())

    def _begin(self, form: Form, request: Request, bucket: Bucket) -> Incoming:
        """All fields are there: may the file come, and where does it go?"""
        fields = form.fields
        if "key" not in fields:
            raise Invalid(
                "Bucket POST must contain a field named 'key'. If it is specified, please check the order of the "
                "fields.",
                code="InvalidArgument",
            )
        fields["key"] = postpolicy.fill_in(fields["key"], form.filename)
        identity = self._auth.admit(request, self._auth.signed_policy(fields, bucket))
        if "policy" in fields:
            form.policy = postpolicy.parse_policy(fields["policy"])
            postpolicy.check_form(form.policy, self._auth.now_s(), bucket.name, fields)
        form.key = check_key(fields["key"])
        self._auth.require_write(identity, bucket, form.key)
        most = limits.PUT_BYTES_MAX
        if form.policy is not None and form.policy.size_max is not None:
            most = min(most, form.policy.size_max)
        headers = _headers_of(fields)
        asked = Request(request.method, request.target, request.path, b"", headers, request.peer, request.secure)
        return self._puts.take_file(asked, bucket, form.key, most)

    def _answer(self, request: Request, exchange: Exchange, bucket: Bucket, form: Form, etag: str) -> None:
        fields = form.fields
        assert form.incoming is not None
        head = self._lines(request) + header_line(b"ETag", f'"{etag}"')
        for algorithm, value in form.incoming.result.checksums.items():
            head += header_line(HEADERS[algorithm].encode(), value)
        target = _redirect(
            fields.get("success_action_redirect") or fields.get("redirect", ""), bucket.name, form.key, etag
        )
        if target:
            exchange.respond(303, head + header_line(b"Location", target))
            return
        scheme = "https" if request.secure else "http"
        location = f"{scheme}://{request.header(b'host')}/{bucket.name}/{quote(form.key, safe='/-_.~')}"
        head += header_line(b"Location", location)
        status = _STATUSES.get(fields.get("success_action_status", ""), 204)
        if status != 201:
            exchange.respond(status, head)
            return
        inner = "".join(
            element(name, value)
            for name, value in (
                ("Location", location),
                ("Bucket", bucket.name),
                ("Key", form.key),
                ("ETag", f'"{etag}"'),
            )
        )
        exchange.respond(201, head + CONTENT_TYPE, document("PostResponse", inner))


def _headers_of(fields: dict[str, str]) -> dict[bytes, bytes]:
    """The request headers that say what the form's fields say. `Invalid` for a value that no header can have."""
    headers: dict[bytes, bytes] = {}
    for name, value in fields.items():
        if name in _CONTENT or (name.startswith("x-amz-") and name not in _SIGNING):
            headers[_checked(name)] = value.encode()
        elif name == "acl":
            headers[b"x-amz-acl"] = value.encode()
        elif name == "tagging":
            headers[TAGGING.encode()] = format_tags(read_tags(value.encode())).encode()
        if name in _UNSERVED:
            raise NotSupported(f"the field {name} is not served: leave it out")
    for name_raw, value_raw in headers.items():
        header_line(name_raw, value_raw)
    return headers


def _checked(name: str) -> bytes:
    if not name.isascii() or not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise Invalid(f"the field name {name[:60]!r} is no header name: rename it", code="InvalidArgument")
    return name.encode()


def _redirect(url: str, bucket: str, key: str, etag: str) -> str:
    """Where a browser goes when the file is stored; "" for an address that is none (S3 then answers as without it)."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    if parts.scheme not in ("http", "https") or not parts.netloc or not url.isascii() or not url.isprintable():
        return ""
    told = f"bucket={quote(bucket)}&key={quote(key, safe='/')}&etag={quote(chr(34) + etag + chr(34))}"
    base, _, fragment = url.partition("#")
    return f"{base}{'&' if parts.query else '?'}{told}" + (f"#{fragment}" if fragment else "")
