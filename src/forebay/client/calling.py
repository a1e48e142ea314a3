"""What all requests to a node share: its URL, the token, and the certificates to trust.

Theory. The blocking and the asyncio client differ only in how bytes move. So this module reads these three once: from
the arguments, then from the environment, then from what is saved (`saved.py`). A token that somebody renews stands in a
file (`FOREBAY_TOKEN_FILE`); that is read again, at most every `REREAD_S`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.client.connection import default_trust, parse_url, trust_file
from forebay.client.owners import Owners
from forebay.client.saved import Saved, find
from forebay.core import limits
from forebay.core.errors import Invalid
from forebay.core.messages.http1 import Request
from forebay.ports import clock

if TYPE_CHECKING:
    import ssl

    from forebay.client.connection import Trust

DEFAULT_URL = "http://127.0.0.1:9400"
REREAD_S = 10.0  # Kubernetes renews a token minutes before it ends
Fields = tuple[tuple[str, str], ...]


class Calling:
    """Arguments as of `sync.connect`; `trust` makes the TLS context itself. `Invalid` if the URL is malformed."""

    def __init__(
        self, url: str | None, token: str | None, patience_s: float | None, ca: str | None, trust: Trust | None = None
    ) -> None:
        named = url or os.environ.get("FOREBAY_URL") or ""
        saved = find(named) or Saved(named or DEFAULT_URL)
        self.endpoint = parse_url(saved.url)
        self.patience_s = patience_s or limits.CLIENT_STALL_TIMEOUT_S
        found = os.environ.get("FOREBAY_TOKEN", "") if token is None else token
        self._file = os.environ.get("FOREBAY_TOKEN_FILE", "") if token is None and not found else ""
        self._read_s = clock.monotonic_s()
        self._fields: Fields = ()
        self._token = ""
        self._use(self._read() if self._file else found or (saved.token if token is None else ""))
        self.given_token = None if self._file else self._token  # for another process, which reads the file itself
        authorities = (os.environ.get("FOREBAY_CA") or saved.ca) if ca is None else ca
        self._trust = trust or ((lambda: trust_file(authorities)) if authorities else default_trust)
        self.ca = ca or (None if os.environ.get("FOREBAY_CA") else saved.ca or None)  # for another process
        self._context: ssl.SSLContext | None = None
        self.owners = Owners(self.endpoint)

    @property
    def token(self) -> str:
        """The bearer token; "" without one."""
        if self._file and clock.monotonic_s() - self._read_s >= REREAD_S:
            self._read_s = clock.monotonic_s()
            try:
                self._use(self._read())
            except Invalid:  # it is being replaced, or was: the node says if the old one is too old
                pass
        return self._token

    def _read(self) -> str:
        try:
            token = Path(self._file).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise Invalid(f"FOREBAY_TOKEN_FILE={self._file} cannot be read ({why}): correct the path") from None
        if not token or not token.isprintable():
            raise Invalid(f"{self._file} (FOREBAY_TOKEN_FILE) holds no token of one line: look at what writes it")
        return token

    def _use(self, token: str) -> None:
        if token != self._token or not self._fields:
            proof = (("Authorization", f"Bearer {token}"),) if token else ()
            self._fields = (("User-Agent", "forebay"), ("Accept", "*/*"), *proof)
            self._token = token

    def dress(self, request: Request) -> tuple[Request, Fields]:
        """The request as it is sent, and the fields that go in front of its own."""
        if self._file:
            _ = self.token  # it may be another now
        if self.endpoint.base:
            request = request._replace(target=self.endpoint.base + request.target)
        return request, self._fields

    def context(self) -> ssl.SSLContext:
        """For https. Made once: reading the certificates that this machine trusts takes 20 ms."""
        if self._context is None:
            self._context = self._trust()
        return self._context
