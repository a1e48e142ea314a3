"""What all requests to a node share: its URL, the token, and the certificates to trust.

Theory. The blocking and the asyncio client differ only in how bytes move. So this module reads these three once: from
the arguments, then from the environment, then from what is saved (`saved.py`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from forebay.client.connection import default_trust, parse_url, trust_file
from forebay.client.http1 import Request
from forebay.client.saved import Saved, find
from forebay.core import limits

if TYPE_CHECKING:
    import ssl

    from forebay.client.connection import Trust

DEFAULT_URL = "http://127.0.0.1:9400"
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
        self.token = token = (os.environ.get("FOREBAY_TOKEN") or saved.token) if token is None else token
        proof = (("Authorization", f"Bearer {token}"),) if token else ()
        self._fields: Fields = (("User-Agent", "forebay"), ("Accept", "*/*"), *proof)
        authorities = (os.environ.get("FOREBAY_CA") or saved.ca) if ca is None else ca
        self._trust = trust or ((lambda: trust_file(authorities)) if authorities else default_trust)
        self.ca = ca or (None if os.environ.get("FOREBAY_CA") else saved.ca or None)  # for another process
        self._context: ssl.SSLContext | None = None

    def dress(self, request: Request) -> tuple[Request, Fields]:
        """The request as it is sent, and the fields that go in front of its own."""
        if self.endpoint.base:
            request = request._replace(target=self.endpoint.base + request.target)
        return request, self._fields

    def context(self) -> ssl.SSLContext:
        """For https. Made once: reading the certificates that this machine trusts takes 20 ms."""
        if self._context is None:
            self._context = self._trust()
        return self._context
