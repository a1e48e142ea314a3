"""Makes the requests that obstore cannot: true listings, writes, and keys that obstore cannot name.

Theory. obstore parses keys as paths. Its listings call the objects `x//y` and `marker/` by the names `x/y` and `marker`
(measured with 0.12.1), one key with a control character fails the whole listing, and listings with a delimiter have no
pages. Real buckets have folder markers and doubled slashes, and a listing may not lie. So listings are HTTP requests of
our own: one authorised GET per page, in a thread. The same code fetches objects whose keys obstore would change.
Bodies of ordinary keys are read through obstore, which is several times faster. Writes use `tell` (`http/bodies.py`),
one attempt each.

A connection carries one request at a time and returns to a small pool. A pooled connection that turns out closed is
replaced once; the server has not seen that request. A write takes only a connection that is still open, since nobody
knows what the server did with a lost one. Retries are the stack's.

Invariants. (1) A body that ends early raises. (2) The path is sent as it was signed: encoded once, never normalised.
(3) No call blocks the event loop: `Wire.run` runs everything that waits.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import http.client
import select
import ssl
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from forebay.backends import errors
from forebay.backends.http import bodies
from forebay.backends.seam import Body
from forebay.core import limits
from forebay.core.errors import ForebayError, Invalid, NotSupported, Unavailable
from forebay.core.record import header_text
from forebay.core.s3rules.keeping import NAMES
from forebay.core.s3rules.sigv4 import canonical_query
from forebay.core.types import Headers, ObjectInfo, RangeSpec
from forebay.core.versions import ID_HEADER

THREADS_MAX = 8  # listings at once; each waits for the network nearly all its time
SENDERS_MAX = 2 * limits.FLUSHES_MAX  # writes that are sending at once: all flushes, and as many of clients
IDLE_MAX = limits.FLUSHES_MAX  # connections kept between requests
WRITE_ANSWER_TIMEOUT_S = 120.0  # a service that joins parts or copies gigabytes may say nothing for as long
ANSWER_BYTES_MAX = 16 * limits.MIB  # 1,000 keys of 1,024 bytes, every byte percent-encoded, are 4 MB
CHUNK_BYTES = 256 * limits.KIB
CONTENT_HEADERS = (
    "content-type",
    "content-encoding",
    "content-language",
    "content-disposition",
    "cache-control",
    "expires",
)

_COMPARED_ONLY = "~"  # begins a version that cannot be sent as a condition

NOTHING = Body(0, b"")

ResultT = TypeVar("ResultT")


# Headers of a request about to be sent: (method, encoded path, encoded query, headers) -> headers with authorisation.
Authorize = Callable[[str, str, str, Mapping[str, str]], dict[str, str]]


def anonymous(method: str, path: str, query: str, headers: Mapping[str, str]) -> dict[str, str]:
    """No authorisation."""
    return dict(headers)


def version_of(etag: str, modified_s: float, size_bytes: int) -> str:
    """The version that an answer's ETag makes: itself, or with date and size where it is weak or absent."""
    if etag and not etag.startswith("W/"):
        return etag
    return f"{_COMPARED_ONLY}{etag}-{modified_s}-{size_bytes}"


def is_condition(version: str) -> bool:
    """Whether `version` can be sent in If-Match; one that cannot is compared with the answer's only."""
    return bool(version) and not version.startswith(_COMPARED_ONLY)


def of_version_id(info: ObjectInfo, version_id: str, said: str, what: str) -> ObjectInfo:
    """The object that an answer describes, which says that it is of version `said`: it must be the one asked for."""
    if said != version_id:
        raise errors.not_that_version(what, said)
    return msgspec.structs.replace(info, headers=(*info.headers, (ID_HEADER, version_id)))


def bare_etag(etag: str) -> str:
    """An ETag as clients see it: opaque, without quotes."""
    return etag.removeprefix("W/").strip('"')


class Answer(NamedTuple):
    """A whole answer. Header names are lower-case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Wire:
    """Requests to one bucket at `url` (without a final slash). Thread-safe. Methods block but for `run`.

    `bucket` is its name there; `meta` is how the service begins the names of user metadata (`x-amz-meta-`); they come
    out as S3's. `query` goes with every request.
    """

    def __init__(
        self,
        url: str,
        authorize: Authorize,
        client: Mapping[str, Any],
        *,
        bucket: str = "",
        meta: str = "x-amz-meta-",
        query: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.url = url
        self.bucket = bucket
        self._query = list(query)
        self._parts = urlsplit(url)
        self._authorize, self._meta = authorize, meta
        self._unsigned: Mapping[str, str] = client.get("default_headers", {})  # a proxy on the way may add to them
        self._dial = client.get("dial")  # see backends/bounds.py
        self._tls = _tls_context(client) if self._parts.scheme == "https" else None
        self._proxy = _proxy_for(self._parts.scheme, self._parts.hostname or "", client)
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._threads = bodies.Threads(THREADS_MAX, "forebay-wire")
        self._senders = bodies.Threads(SENDERS_MAX, "forebay-send")

    async def run(self, call: Callable[[], ResultT]) -> ResultT:
        """`call` in one of this object's threads, so that listings never use up the loop's own."""
        return await asyncio.wrap_future(self._threads.submit(call))

    def ask(self, query: Sequence[tuple[str, str]], *, method: str = "GET", key: str = "") -> Answer:
        """A whole small answer, whatever its status; `Unavailable` if there is none."""
        connection, answer = self._send(method, key, query, {})
        try:
            body = answer.read(ANSWER_BYTES_MAX + 1)
            if len(body) > ANSWER_BYTES_MAX:
                raise Unavailable(
                    f"{self.url}: an answer has more than {ANSWER_BYTES_MAX} bytes: is this the endpoint?"
                )
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error
        finally:
            self._release(connection, answer)
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, body)

    # --- objects whose keys obstore cannot name ----------------------------------------------------------------------
    def open(
        self, key: str, range: RangeSpec | None, version: str, *, head: bool = False, version_id: str = ""
    ) -> WireFetch:
        """The object's answer with its body still to come (none with `head`). `version_id`: the version to ask for."""
        headers = {}
        if range is not None:
            headers["range"] = _range_header(range)
        if is_condition(version):
            headers["if-match"] = version
        what = f"{self.url}/{key}"
        query = [("versionId", version_id)] if version_id else []
        connection, answer = self._send("HEAD" if head else "GET", key, query, headers)
        try:
            if answer.status not in (200, 206):
                body = answer.read(ANSWER_BYTES_MAX).decode(errors="replace")
                said = {name.lower(): value for name, value in answer.getheaders()}
                raise errors.from_status(answer.status, body, what, said)
            info, start, end = self._describe(key, answer, what)
            if version_id:
                info = of_version_id(info, version_id, answer.getheader(ID_HEADER) or "", what)
            if version and info.version != version:
                raise errors.changed(what)
            if range is not None and (start, end) != range.resolve(info.size_bytes):
                raise NotSupported(f"{what}: the server does not answer ranges exactly: only whole objects can be read")
            if head or start == end:
                answer.read()
        except BaseException as error:
            self._release(connection, answer)
            if isinstance(error, OSError | http.client.HTTPException):
                raise self._broken(error) from error
            raise
        if head:
            start = end = 0
        return WireFetch(self, connection, answer, info, start, end, what)

    def _describe(self, key: str, answer: http.client.HTTPResponse, what: str) -> tuple[ObjectInfo, int, int]:
        """The object, and the half-open range that the answer's body covers."""
        said = answer.getheader("content-length")
        if said is None:
            raise NotSupported(f"{what}: the server does not say the object's size (no Content-Length)")
        length = int(said)
        start, size = 0, length
        if answer.status == 206:
            unit, _, rest = (answer.getheader("content-range") or "").partition(" ")
            span, _, total = rest.partition("/")
            first, _, last = span.partition("-")
            if unit != "bytes" or not (first.isdigit() and last.isdigit() and total.isdigit()):
                raise Unavailable(f"{what}: the range in the answer is unreadable ({rest!r}): try again")
            start, size = int(first), int(total)
            if int(last) + 1 - start != length or start + length > size:
                raise Unavailable(f"{what}: the answer's range {rest} does not fit its length {length}: try again")
        etag = answer.getheader("etag") or ""
        modified = answer.getheader("last-modified")
        modified_s = parsedate_to_datetime(modified).timestamp() if modified else 0.0
        version = version_of(etag, modified_s, size)
        info = ObjectInfo(key, size, version, bare_etag(etag), modified_s, self._stored_headers(answer))
        return info, start, start + length

    def _stored_headers(self, answer: http.client.HTTPResponse) -> Headers:
        found = [(name, _text(value)) for name in (*CONTENT_HEADERS, *NAMES) if (value := answer.getheader(name))]
        for name, value in sorted(answer.getheaders()):
            if name.lower().startswith(self._meta):
                found.append(("x-amz-meta-" + name.lower().removeprefix(self._meta), _text(value)))
        return tuple(found)

    # --- writes ------------------------------------------------------------------------------------------------------
    async def tell(
        self,
        method: str,
        key: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        body: Body = NOTHING,
        around: tuple[bytes, bytes] = (b"", b""),
        path: str = "",
    ) -> Answer:
        """Send `body` (its length and MD5 go along) and return the whole answer, whatever its status.

        `around`: what stands before and after the body in the request; `path`: encoded, instead of that of `key`.
        `Unavailable` if there is no answer: then the write may have happened or not. What `body.ready` raises, leaves.
        """
        exchange = bodies.Exchange(self._senders)
        before, after = around
        fields = {**(headers or {}), "content-length": str(len(before) + body.size_bytes + len(after))}
        if body.md5:
            fields["content-md5"] = base64.b64encode(bytes.fromhex(body.md5)).decode()
        begin = functools.partial(self._begin, exchange, method, path or _encoded(key), query, fields)
        try:
            if body.size_bytes <= bodies.PIECE_BYTES:
                await body.ready(body.size_bytes)
                return await exchange.step(lambda: self._finish(exchange, begin(before + bodies.whole(body) + after)))
            failed = await exchange.step(functools.partial(begin, before))
            sent = 0
            while sent < body.size_bytes and failed is None:
                end = min(sent + bodies.PIECE_BYTES, body.size_bytes)
                await body.ready(end)
                failed = await exchange.step(functools.partial(self._send_piece, exchange, body, sent, end))
                sent = end
            if after and failed is None:
                last = Body(len(after), after)
                failed = await exchange.step(functools.partial(self._send_piece, exchange, last, 0, len(after)))
            return await exchange.step(functools.partial(self._finish, exchange, failed))
        except BaseException:
            exchange.close()
            raise

    def _begin(
        self,
        exchange: bodies.Exchange,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]],
        fields: Mapping[str, str],
        data: bytes = b"",
    ) -> OSError | None:
        """Send the head, and `data` after it."""
        target, headers = self._request(method, path, query, fields)
        with self._lock:
            while self._idle and exchange.connection is None:
                kept = self._idle.pop()
                if _is_quiet(kept):
                    exchange.connection = kept
                else:
                    kept.close()
        try:
            connection = exchange.connection = exchange.connection or self._connect()
        except OSError as error:
            raise errors.not_connected(error, self.url) from error
        try:
            exchange.keep_going()
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value.encode())
            connection.endheaders()
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error
        except ValueError as error:
            raise Invalid(f"{self.url}{path}: a header cannot be sent ({error}): change the metadata") from error
        return self._send_piece(exchange, Body(len(data), data), 0, len(data)) if data else None

    def _send_piece(self, exchange: bodies.Exchange, body: Body, start: int, end: int) -> OSError | None:
        """None, or why the server takes no more: it may have answered already, and `_finish` reads that."""
        assert exchange.connection is not None
        assert exchange.connection.sock is not None
        try:
            bodies.send_piece(exchange.connection.sock, body, start, end)
        except ConnectionError as error:
            return error
        except OSError as error:
            raise self._broken(error) from error
        return None

    def _finish(self, exchange: bodies.Exchange, failed: OSError | None) -> Answer:
        """The answer; if the body could not be sent whole, the one that the server gave before."""
        connection = exchange.connection
        assert connection is not None
        try:
            if connection.sock is not None:
                connection.sock.settimeout(WRITE_ANSWER_TIMEOUT_S)
            answer = connection.getresponse()
            body = answer.read(ANSWER_BYTES_MAX)
            if connection.sock is not None:
                connection.sock.settimeout(limits.BACKEND_STALL_TIMEOUT_S)
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(failed or error) from error
        if failed is None:
            exchange.connection = None
            self._release(connection, answer)
        else:
            exchange.close()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, body)

    def request_of(
        self, key: str, range: RangeSpec, version: str, more: Mapping[str, str]
    ) -> tuple[str, int, bytes] | None:
        """Host, port and the whole signed head of a GET of that range and version, for somebody else to send; None if
        a proxy stands in between, or TLS."""
        host, port = self._parts.hostname, self._parts.port
        if self._proxy or self._tls is not None or not host or not port:
            return None
        fields = {"range": _range_header(range), "if-match": version, **more}
        target, headers = self._request("GET", _encoded(key), (), fields)
        lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        return host, port, "\r\n".join(lines).encode()

    # --- one exchange ------------------------------------------------------------------------------------------------
    def _request(
        self, method: str, below: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str]
    ) -> tuple[str, dict[str, str]]:
        """The target and all headers of a request; `below` is the encoded path below the URL's."""
        path = quote(self._parts.path, safe="/-_.~") + below or "/"
        query_text = canonical_query(
            [(name.encode(), value.encode()) for name, value in [*query, *self._query]]
        ).decode()
        target = f"{path}?{query_text}" if query_text else path
        if self._proxy and self._parts.scheme == "http":
            target = f"http://{self._parts.netloc}{target}"
        host = self._parts.netloc.rpartition("@")[2]
        fixed = {"host": host, "user-agent": "forebay", "accept-encoding": "identity", **headers}
        return target, {**self._authorize(method, path, query_text, fixed), **self._unsigned}

    def _send(
        self, method: str, key: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request without a body and read the head of its answer."""
        target, sent = self._request(method, _encoded(key), query, headers)
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            reused = connection is not None
            try:
                connection = connection or self._connect()
                connection.request(method, target, headers=sent)
                return connection, connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                if connection is not None:
                    connection.close()
                closed = isinstance(error, http.client.RemoteDisconnected | ConnectionError)
                if not (reused and closed):
                    raise self._broken(error) from error

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        via = urlsplit(self._proxy) if self._proxy else None
        to_host, to_port = (via.hostname or "", via.port) if via else (host, port)
        timeout_s = limits.BACKEND_CONNECT_TIMEOUT_S
        connection: http.client.HTTPConnection
        if self._tls is not None:
            connection = http.client.HTTPSConnection(to_host, to_port, timeout=timeout_s, context=self._tls)
            if via:
                connection.set_tunnel(host, port or 443)
        else:
            connection = http.client.HTTPConnection(to_host, to_port, timeout=timeout_s)
        if self._dial is not None and via is None:  # a proxy of the node's environment decides by itself
            connection._create_connection = self._dial  # type: ignore[attr-defined]
        connection.connect()
        connection.sock.settimeout(limits.BACKEND_STALL_TIMEOUT_S)
        return connection

    def _release(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> None:
        """Keep the connection if its answer was read to the end, else close it."""
        if answer.length == 0:
            answer.read()  # nothing is left to read, but only this tells the connection so
        if answer.isclosed() and not answer.will_close:
            with self._lock:
                if len(self._idle) < IDLE_MAX and not self._is_closed:
                    self._idle.append(connection)
                    return
        connection.close()

    def _broken(self, error: Exception) -> Exception:
        if isinstance(error, ForebayError):
            return error
        if isinstance(error, OSError):
            return errors.from_os(error, self.url)
        return Unavailable(f"{self.url}: the answer is cut or not HTTP ({error!r}): check the endpoint")

    def close(self) -> None:
        """Keep no connection and no idle thread from now on. Whoever still holds this goes on: a bucket's settings may
        change while it is read and written."""
        with self._lock:
            idle, self._idle, self._is_closed = self._idle, [], True
        for connection in idle:
            connection.close()
        self._threads.let_go()
        self._senders.let_go()


class WireFetch:
    """A body that comes through a thread. Closing it waits for no thread: one that still reads ends the connection."""

    def __init__(
        self,
        wire: Wire,
        connection: http.client.HTTPConnection,
        answer: http.client.HTTPResponse,
        info: ObjectInfo,
        start: int,
        end: int,
        what: str,
    ) -> None:
        self.info, self.start, self.end = info, start, end
        self._wire, self._connection, self._answer, self._what = wire, connection, answer, what
        self._exchange = bodies.Exchange(wire._threads, connection)
        self._open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        got_bytes = 0
        try:
            while got_bytes < self.end - self.start and self._open:
                try:
                    chunk = await self._exchange.step(functools.partial(self._answer.read1, CHUNK_BYTES))
                except (OSError, ValueError, http.client.HTTPException) as error:
                    raise Unavailable(f"{self._what}: the body broke off ({error!r}): read the rest again") from error
                if not chunk:
                    raise errors.ended_early(self._what, got_bytes, self.end - self.start)
                got_bytes += len(chunk)
                yield chunk
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        if self._open:
            self._open = False
            if not self._exchange.stop():
                with contextlib.suppress(OSError):
                    self._wire._release(self._connection, self._answer)


def _encoded(key: str) -> str:
    """The path of `key` below the bucket's URL; "" for the bucket itself."""
    return "/" + quote(key, safe="/-_.~") if key else ""


def _is_quiet(connection: http.client.HTTPConnection) -> bool:
    """Whether an idle connection is open and silent: a server that closes it is heard."""
    if connection.sock is None:
        return False
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return not poll.poll(0)


def _text(value: str) -> str:
    """A header's value, whose bytes http.client reads as Latin-1."""
    return header_text(value.encode("latin-1"))


def _range_header(range: RangeSpec) -> str:
    if range.first is None:
        return f"bytes=-{range.last or 0}"
    return f"bytes={range.first}-{'' if range.last is None else range.last}"


def _tls_context(client: Mapping[str, Any]) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if client.get("root_certificate"):
        context.load_verify_locations(cadata=client["root_certificate"])
    if client.get("allow_invalid_certificates"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _proxy_for(scheme: str, host: str, client: Mapping[str, Any]) -> str:
    """The proxy's URL, or "": from the options, else from the environment as every HTTP client reads it."""
    if client.get("proxy_url"):
        return str(client["proxy_url"])
    if urllib.request.proxy_bypass(host):
        return ""
    return urllib.request.getproxies().get(scheme, "")
