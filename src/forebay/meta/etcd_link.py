"""Questions to etcd's members, one after the other, over the JSON gateway that each of them serves.

Theory. Every member answers every question, so it does not matter which is asked, unless it is dead, frozen or cut off
from the others. The one that answered last is asked first; another takes its place when it fails. A question that only
reads goes on to the next member after its share of the caller's patience. A question that writes is asked once. So the
member is greeted first with one that reads: if it does not answer, the next one is greeted, and nobody has heard the
write. Then the write has all the patience that is left; without an answer to it, the caller is told that it may have
happened. Writes are rare, and a greeting takes 0.4 ms.

Answers name the cluster they come from. A member of another cluster is a mistake in the list of endpoints: what it says
is not believed, and nothing is written to it.

With an `Access` that names files, connections are TLS; the files are read for each new connection, so a renewed one is
used without a word. With a user, the first question on the way is for a token; when etcd knows it no more (it lasts
minutes, and until a member restarts), a new one is asked for. A question refused for its token was not carried out.

The gateway is HTTP/1.1 and JSON, so what speaks to a node speaks to etcd (`core/messages/http1.py`).

Rejected: aetcd and grpc (docs/dependencies.md); asking all members at once (etcd's work, times the members).

Invariants. (1) A call ends within its patience. (2) A write is sent at most once. (3) A connection carries one question
at a time, and is closed unless its answer was read to the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forebay.core.errors import Busy, Corrupt, Denied, ForebayError, Invalid, NotFound, Unavailable
from forebay.core.limits import META_ANSWER_BYTES_MAX, META_PATIENCE_S
from forebay.core.messages.http1 import Chunks, Head, Request, build_request, parse_head

PIECE_BYTES = 64 * 1024
SPARE_MAX = 4  # idle connections kept
TRIES = 3  # what is tried gets this part of the patience, so that another member has its turn
ROUNDS_MAX = 50  # how often all are asked, at most, while the patience lasts

Address = tuple[str, int]
Fields = dict[str, Any]

# What etcd's gRPC codes mean to us; the rest is `Unavailable`.
KINDS: dict[int, type[ForebayError]] = {3: Invalid, 5: NotFound, 7: Denied, 8: Busy, 16: Denied}
NO_TOKEN = ("invalid auth token", "user name is empty", "revision of auth store is old")
ABOUT_TLS = "perhaps it wants TLS (--cluster-ca) or a certificate (--cluster-cert), or speaks no TLS"
COMMON_NAME = b"CommonName of client"
NOT_ALLOWED = "permission denied"  # also what nobody in particular is told
NO_AUTH = "authentication is not enabled"
PASSWORD_VARIABLE = "FOREBAY_CLUSTER_PASSWORD"
NO_ROOM = "database space exceeded"  # has code 8 too, but passes only when an operator makes room
# A read that needs a majority, of nothing: who answers it is alive, has a leader, and says which cluster it is of.
GREETING = ("/v3/kv/range", {"key": "AA==", "limit": "1"})
CUT = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, Corrupt)  # in the middle of an answer


class Access(NamedTuple):
    """How etcd knows us, and we it: PEM files (`ca`: who vouches for its members; `cert` and `key`: ours) and a user,
    whose password stands in a file, or else in the environment as FOREBAY_CLUSTER_PASSWORD."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""

    def context(self) -> ssl.SSLContext | None:
        """For a new connection; None for one without TLS. `Invalid` if a file cannot be used."""
        if not self.ca and not self.cert:
            return None
        context = ssl.create_default_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        path = self.ca
        try:
            if self.ca:
                context.load_verify_locations(self.ca)
            if self.cert:
                path = self.cert
                context.load_cert_chain(self.cert, self.key or None, _no_pass_phrase)
        except OSError as error:
            flag = "--cluster-ca" if path is self.ca else "--cluster-cert (and --cluster-key)"
            why = getattr(error, "reason", None) or error.strerror or str(error)
            raise Invalid(f"{flag}: {path} cannot be used ({why}): give PEM files that this user can read") from None
        return context

    def password(self) -> str:
        """Of the user. `Invalid` if there is none."""
        if not self.password_file:
            said = os.environ.get(PASSWORD_VARIABLE, "")
            if not said:
                raise Invalid(
                    f"etcd's user {self.user} needs a password: give --cluster-password-file FILE, or set "
                    f"{PASSWORD_VARIABLE}"
                )
            return said
        try:
            return Path(self.password_file).read_text("utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise Invalid(f"--cluster-password-file {self.password_file} cannot be read: {error}") from None

    def check(self) -> None:
        """`Invalid` unless all that is named can be used now."""
        if self.key and not self.cert:
            raise Invalid("--cluster-key is given without --cluster-cert: give the certificate's file too")
        if self.password_file and not self.user:
            raise Invalid("--cluster-password-file is given without --cluster-user: whose password is it?")
        self.context()
        if self.user:
            self.password()


def _no_pass_phrase() -> str:
    raise Invalid("the key of --cluster-cert has a pass phrase: give one without (`openssl pkey` removes it)")


class _TokenGone(Exception):
    """etcd does not know the token, or wants one: nothing was carried out."""


class _Connection:
    """One TCP connection to one member. `token` says who asks."""

    def __init__(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.address = address
        self.token = ""
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, address: Address, access: Access) -> _Connection:
        return cls(address, *await asyncio.open_connection(*address, limit=2 * PIECE_BYTES, ssl=access.context()))

    def is_quiet(self) -> bool:
        """Whether it looks as if it could take a question."""
        return not self._reader.at_eof() and not self._writer.is_closing()

    def close(self) -> None:
        self._writer.transport.abort()

    async def begin(self, path: str, question: Fields) -> _Answer:
        """Ask, and read the answer's head."""
        fields = [("Content-Type", "application/json")]
        if self.token:
            fields.append(("Authorization", self.token))
        request = Request("POST", path, tuple(fields), json.dumps(question).encode())
        self._writer.write(build_request(request, named(self.address)))
        return _Answer(self._reader, parse_head(await self._reader.readuntil(b"\r\n\r\n"), "POST"))

    async def ask(self, path: str, question: Fields) -> tuple[_Answer, bytes]:
        """Ask, and read the whole answer."""
        answer = await self.begin(path, question)
        body = b""
        while piece := await answer.more():
            body += piece
            _check_bound(body)
        return answer, body


class _Answer:
    """The answer to one question, whose body is read as it comes."""

    def __init__(self, reader: asyncio.StreamReader, head: Head) -> None:
        if head.length is None and not head.chunked:
            raise Corrupt(f"the answer does not say how long it is: check what listens there; {ABOUT_TLS}")
        self.head = head
        self._reader = reader
        self._chunks = Chunks() if head.chunked else None
        self._left = head.length or 0

    async def more(self) -> bytes:
        """The next bytes; none at the end. May be cancelled and asked again."""
        if self._chunks is None:
            piece = await self._read(min(self._left, PIECE_BYTES)) if self._left else b""
            self._left -= len(piece)
            return piece
        while not self._chunks.done:
            if piece := self._chunks.feed(await self._read(PIECE_BYTES)):
                return piece
        return b""

    async def _read(self, size_bytes: int) -> bytes:
        piece = await self._reader.read(size_bytes)
        if not piece:
            raise ConnectionError("it closed the connection")
        return piece


class Members:
    """See the module's header. `addresses` are those of the members' client URLs, `greeting` a read that the user may
    do."""

    def __init__(
        self,
        addresses: Sequence[Address],
        patience_s: float = META_PATIENCE_S,
        access: Access = Access(),  # it is a value
        greeting: tuple[str, Fields] = GREETING,
    ) -> None:
        assert addresses
        self._access, self._greeting = access, greeting
        self._token = ""
        self._addresses = list(addresses)  # the one to ask first is first
        self._patience_s = patience_s
        self._spare: list[_Connection] = []
        self._cluster = ""
        self._closed = False

    async def read(self, path: str, question: Fields) -> Fields:
        """The answer to a question that may be asked twice. `Unavailable` when nobody answers in time."""
        return await self._call(path, question, repeatable=True)

    async def write(self, path: str, question: Fields) -> Fields:
        """The answer to a question that is asked once. After `Unavailable` it may or may not have happened."""
        return await self._call(path, question, repeatable=False)

    async def stream(self, path: str, question: Fields, silence_s: float) -> AsyncGenerator[Fields | None, None]:
        """The answers to a question that has many, from one member, as they come; None for each `silence_s` without.
        `Unavailable` when they end."""
        address = self._addresses[0]
        connection: _Connection | None = None
        line = b""
        try:
            async with asyncio.timeout(self._patience_s / TRIES):
                connection = await _Connection.open(address, self._access)
                await self._introduce(connection)
                answer = await connection.begin(path, question)
            while True:
                try:
                    async with asyncio.timeout(silence_s):
                        piece = await answer.more()
                except TimeoutError:
                    yield None
                    continue
                if not piece:
                    raise ConnectionError("it ended the watch")
                *whole, line = (line + piece).split(b"\n")
                _check_bound(line)
                for event in whole:
                    yield self._judged(address, event, 200)
        except _TokenGone as error:
            self._token = ""
            raise Unavailable(f"etcd at {named(address)} wants a new token") from error
        except (*CUT, TimeoutError, Unavailable) as error:
            self._pass_over(address)
            raise Unavailable(f"etcd at {named(address)} sends no more: {_said(error)}") from error
        finally:
            if connection is not None:
                connection.close()

    async def aclose(self) -> None:
        """Close what is kept open. Twice is fine."""
        self._closed = True
        while self._spare:
            self._spare.pop().close()

    async def _call(self, path: str, question: Fields, *, repeatable: bool) -> Fields:
        assert not self._closed, "the metadata store is closed"
        failed: dict[Address, BaseException] = {}
        sent: list[Address] = []  # to whom the question itself went, where it is a write
        try:
            async with asyncio.timeout(self._patience_s):
                while True:
                    address = self._addresses[0]
                    try:
                        return await self._ask(address, path, question, None if repeatable else sent)
                    except NotFound:  # an OSError by birth, and an answer
                        raise
                    except _TokenGone:
                        self._token = ""
                        sent.clear()
                        await asyncio.sleep(self._patience_s / ROUNDS_MAX)
                        continue
                    except (*CUT, TimeoutError, Unavailable) as error:
                        failed[address] = error
                    if sent or _all_refuse(failed, self._addresses):
                        break
                    self._pass_over(address)
                    if len(failed) == len(self._addresses):
                        await asyncio.sleep(self._patience_s / ROUNDS_MAX)
        except TimeoutError as error:
            failed.setdefault(self._addresses[0], error)
        self._pass_over(self._addresses[0])
        doubt = ". A change may or may not have happened: read before you decide anew" if sent else ""
        said = ", ".join(f"{named(address)}: {_said(failed[address])}" for address in sorted(failed))
        raise Unavailable(f"etcd does not answer: check its members ({said}){doubt}")

    async def _ask(self, address: Address, path: str, question: Fields, sent: list[Address] | None) -> Fields:
        """One question to one member. With `sent`, one that writes: the member is in it once it may have heard."""
        share_s = self._patience_s / TRIES
        connection = await self._connected(address, share_s)
        try:
            async with asyncio.timeout(share_s):
                await self._introduce(connection)
            if sent is not None:
                async with asyncio.timeout(share_s):
                    answer, body = await connection.ask(*self._greeting)
                self._judged(address, body, answer.head.status)
                sent.append(address)
            async with asyncio.timeout(share_s if sent is None else None):
                answer, body = await connection.ask(path, question)
        except BaseException:
            connection.close()
            raise
        if answer.head.keep_alive and len(self._spare) < SPARE_MAX and not self._closed:
            self._spare.append(connection)
        else:
            connection.close()
        return self._judged(address, body, answer.head.status)

    async def _connected(self, address: Address, share_s: float) -> _Connection:
        while self._spare:
            connection = self._spare.pop()
            if connection.address == address and connection.is_quiet():
                return connection
            connection.close()
        async with asyncio.timeout(share_s):
            return await _Connection.open(address, self._access)

    async def _introduce(self, connection: _Connection) -> None:
        """Have the connection say who we are."""
        if not self._access.user:
            return
        if not self._token:
            question = {"name": self._access.user, "password": self._access.password()}
            answer, body = await connection.ask("/v3/auth/authenticate", question)
            said = _decoded(body)
            why = str(said.get("message") or said.get("error") or "")
            if NO_AUTH in why:  # it may be switched on at any time
                return
            if "authentication failed" in why or "user name not found" in why:
                user, at = self._access.user, named(connection.address)
                raise Denied(f"etcd at {at} refuses the user {user}: check --cluster-user and the password")
            self._token = str(self._judged(connection.address, body, answer.head.status).get("token", ""))
        connection.token = self._token

    def _judged(self, address: Address, data: bytes, status: int) -> Fields:
        """The answer, unless it is an error or comes from another cluster."""
        answer = _decoded(data)
        error = answer.get("error")
        if error is not None or status != 200:
            fields = error if isinstance(error, dict) else answer
            said = str(fields.get("message") or error or f"status {status}")
            if any(words in said for words in NO_TOKEN) or (NOT_ALLOWED in said and not self._token):
                if self._access.user:
                    raise _TokenGone
                raise Denied(f"etcd at {named(address)} wants to know who asks: give --cluster-user and a password")
            if NO_ROOM in said:
                said += ": compact and defragment it, then disarm its alarm"
            code = int(fields.get("code", fields.get("grpc_code", 0)) or 0)
            raise KINDS.get(code if NO_ROOM not in said else 0, Unavailable)(f"etcd at {named(address)}: {said}")
        answer = dict(answer.get("result", answer))
        cluster = str(answer.get("header", {}).get("cluster_id", ""))
        if not cluster:
            raise Corrupt("the answer names no cluster: check what listens there")
        self._cluster = self._cluster or cluster
        if cluster != self._cluster:
            raise Unavailable(f"it is of cluster {cluster}, others are of {self._cluster}: correct the endpoints")
        return answer

    def _pass_over(self, address: Address) -> None:
        """Ask another one first from now on."""
        if self._addresses[0] == address:
            self._addresses.append(self._addresses.pop(0))


def named(address: Address) -> str:
    """HOST:PORT, as one types it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _decoded(data: bytes) -> Fields:
    if data.startswith(COMMON_NAME):
        raise Denied("etcd's gateway takes no certificate with a common name once etcd has users: show one without")
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise Corrupt(f"the answer begins with {data[:40]!r}: check what listens there")
    return answer


def _all_refuse(failed: dict[Address, BaseException], addresses: Sequence[Address]) -> bool:
    """Whether nobody listens anywhere: that does not pass within anybody's patience."""
    return all(isinstance(failed.get(address), ConnectionRefusedError) for address in addresses)


def _said(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}): check --cluster-ca and the address"
    if isinstance(error, ssl.SSLError):
        if "CERTIFICATE" in (error.reason or ""):
            return f"it does not take our certificate ({error.reason}): check --cluster-cert"
        return f"no TLS can be spoken with it ({error.reason}): if it speaks none, leave out --cluster-ca"
    if isinstance(error, (asyncio.IncompleteReadError, ConnectionResetError)):
        return f"it hung up: {ABOUT_TLS}"
    return str(error) or type(error).__name__


def _check_bound(data: bytes) -> None:
    if len(data) > META_ANSWER_BYTES_MAX:
        raise Corrupt(f"the answer has more than {META_ANSWER_BYTES_MAX} bytes: check what listens there")
