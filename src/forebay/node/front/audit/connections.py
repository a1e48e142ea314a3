"""Connections that tell the audit log of each request.

Theory. Classes of their own: a node without an audit log has the plain ones, and pays nothing, not even a question
whether there is one. What is added stands before and after what `Connection` does; it changes no answer, but for the
id in `x-amz-request-id` where the API gives none, so that every line has one that its client saw too.

Invariant. A request that reached a handler, or was refused with its head known, is told of exactly once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.core.errors import ForebayError
from forebay.core.metrics import Histogram
from forebay.node.front.audit.audit import Audit, code_of
from forebay.node.front.http.connection import Connection
from forebay.node.front.http.parts import BODY, BUSY, NONE
from forebay.node.front.http.tls_connection import TlsConnection

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.node.front.http.requests import File, Request
    from forebay.node.front.http.server import Server
    from forebay.node.tls import TlsFiles

    _Base = Connection
else:
    _Base = object

_ID = b"x-amz-request-id: "


class _Told:
    """What the audit log is told of the request that is being answered; `asked` is None once it was."""

    __slots__ = ("answer_bytes", "asked", "audit", "error", "request_id")

    def __init__(self, audit: Audit) -> None:
        self.audit = audit
        self.begin(None)

    def begin(self, asked: Request | None, error: str = "") -> None:
        self.asked, self.error = asked, error
        self.request_id = b""
        self.answer_bytes = 0

    def tell(self, status: int, error: str, *, cut: bool) -> None:
        asked, self.asked = self.asked, None
        if asked is not None:
            self.audit.answered(asked, status, error, self.request_id.decode(), self.answer_bytes, cut)


class _Audited(_Base):
    """What both kinds have."""

    __slots__ = ()

    _told: _Told

    # --- a request comes ---------------------------------------------------------------------------------------------
    def _handle(self) -> None:
        self._told.begin(self.request)
        super()._handle()

    def _refuse(self, error: ForebayError) -> None:
        self._told.begin(self.request if self._phase == BODY else None, code_of(error))
        super()._refuse(error)

    # --- it is answered ----------------------------------------------------------------------------------------------
    def fail(self, error: ForebayError) -> None:
        self._told.error = code_of(error)
        super().fail(error)

    def respond(self, status: int, head: bytes = b"", body: bytes = b"", size_bytes: int | None = None) -> None:
        self._told.answer_bytes = 0 if self._mute else len(body)
        super().respond(status, self._identified(head), body, size_bytes)

    def send_file(
        self,
        status: int,
        head: bytes,
        file: File,
        offset: int,
        size_bytes: int,
        fault: Callable[[int], None],
        latency: Histogram | None = None,
    ) -> None:
        self._told.answer_bytes = size_bytes
        super().send_file(status, self._identified(head), file, offset, size_bytes, fault, latency)

    def start(self, status: int, head: bytes, size_bytes: int | None = None) -> None:
        self._told.answer_bytes = 0 if self._mute else size_bytes or 0
        super().start(status, self._identified(head), size_bytes)

    def _owe(self, size_bytes: int) -> None:
        if self._owed is None and not self._mute:  # nobody said before how much it would be
            self._told.answer_bytes += size_bytes
        super()._owe(size_bytes)

    def _identified(self, head: bytes) -> bytes:
        """`head` with an id."""
        lines = b"\r\n" + head
        at = lines.find(b"\r\n" + _ID)
        if at < 0:
            line = self._told.audit.ids.line()
            head, lines, at = head + line, b"\r\n" + line, 0
        begin = at + 2 + len(_ID)
        self._told.request_id = lines[begin : lines.find(b"\r\n", begin)]
        return head

    # --- it is over --------------------------------------------------------------------------------------------------
    def _finish(self) -> None:
        if self._task is None:
            self._told.tell(self._status, self._told.error, cut=False)
        super()._finish()

    def _close(self, reason: str, reset: bool = False) -> None:
        if self._phase == BUSY:
            error = self._told.error or f"cut: {reason or 'stop'}"
            self._told.tell(0 if self._stage == NONE else self._status, error, cut=True)
        super()._close(reason, reset)


class AuditedConnection(_Audited, Connection):
    """A plain one."""

    __slots__ = ("_told",)

    def __init__(self, server: Server, audit: Audit) -> None:
        super().__init__(server)
        self._told = _Told(audit)


class AuditedTlsConnection(_Audited, TlsConnection):
    """One with TLS."""

    __slots__ = ("_told",)

    def __init__(self, server: Server, tls: TlsFiles, audit: Audit) -> None:
        super().__init__(server, tls.context)
        self._told = _Told(audit)
