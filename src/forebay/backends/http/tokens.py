"""Bearer tokens: keeps one fresh, and fetches it from an OAuth endpoint. Google and Azure share it."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from forebay.core import limits
from forebay.core.errors import Denied, Unavailable
from forebay.ports.clock import Clock

EARLY_S = 120.0  # a token is renewed this long before it ends
LIFE_DEFAULT_S = 3600.0  # where an endpoint does not say: what Google and Microsoft both give
ANSWER_BYTES_MAX = 1 * limits.MIB


class Token(NamedTuple):
    """A bearer token; `expires_s` is Unix time, None if it is not known to end."""

    text: str
    expires_s: float | None

    def __repr__(self) -> str:
        return "Token(…)"


class Tokens:
    """A token that is always fresh. `current` may block for a round trip: call it in a thread."""

    def __init__(self, find: Callable[[], Token], clock: Clock) -> None:
        self._find, self._clock = find, clock
        self._lock = threading.Lock()
        self._token: Token | None = None

    def current(self) -> Token:
        """A token good for at least a minute, or `Denied` or `Unavailable`."""
        with self._lock:
            token = self._token
            if token is None or (token.expires_s is not None and self._clock.wall_s() >= token.expires_s - EARLY_S):
                token = self._token = self._find()
            return token

    def for_obstore(self) -> dict[str, Any]:
        """The token in the shape that obstore's `credential_provider` returns."""
        token = self.current()
        end = None if token.expires_s is None else datetime.fromtimestamp(token.expires_s, UTC)
        return {"token": token.text, "expires_at": end}

    def authorize(self, method: str, path: str, query: str, headers: Mapping[str, str]) -> dict[str, str]:
        """Headers with the token, for `wire.Wire`."""
        return {**headers, "authorization": f"Bearer {self.current().text}"}


def ask_for_token(
    url: str, form: Mapping[str, str] | None, clock: Clock, headers: Mapping[str, str] | None = None
) -> Token:
    """The token that an OAuth endpoint gives for `form` (None: a GET); `Denied` if it refuses, `Unavailable` if it does
    not answer. Blocks."""
    body = urllib.parse.urlencode(form).encode() if form is not None else None
    request = urllib.request.Request(url, data=body, headers=dict(headers or {}))
    timeout_s = limits.BACKEND_CONNECT_TIMEOUT_S
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            found = json.loads(answer.read(ANSWER_BYTES_MAX))
    except urllib.error.HTTPError as error:
        with error:
            said = " ".join(error.read(300).decode(errors="replace").split())
        if error.code < 500 and error.code != 429:
            raise Denied(f"{url} refuses a token (HTTP {error.code}: {said}): renew the credentials") from error
        raise Unavailable(f"{url} gives no token now (HTTP {error.code}): try again") from error
    except (OSError, ValueError) as error:
        raise Unavailable(f"{url} gives no token ({error}): check the network") from error
    if not isinstance(found, dict) or not isinstance(found.get("access_token"), str):
        raise Unavailable(f"{url} answers without an access_token: check the endpoint")
    return Token(found["access_token"], clock.wall_s() + float(found.get("expires_in") or LIFE_DEFAULT_S))
