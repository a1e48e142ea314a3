"""Temporary keys: a key pair and a session token that say by themselves whom they are for.

Theory. Nothing is stored. A session token is a short text (issuer, subject, the rules that fitted, from when and until
when) with an HMAC under a secret of the node, so every front knows it, and a restarted node too. The access key id and
the secret access key are HMACs of the same text under the same secret: the token alone tells neither.

What the session allows is worked out when it is used, from the rules as they are then (`core/oidc.py`): a rule or an
issuer that was taken out is worth nothing from that moment, a shorter `session_s_max` shortens what is there, and what
somebody ended is refused.

Rejected: a table of sessions (each front would need it, a restart would lose it or pay for a write each); claims in the
token (they may be private, and long); the token as the access key id (SDKs bound its length).

Invariants. (1) A token of another node, or changed by one bit, opens nothing. (2) No session outlives the token that it
was given for, nor its issuer's `session_s_max`. (3) At most `SESSIONS_KEPT_MAX` are remembered, none that was not made
here.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from forebay.core.access import Identity
from forebay.core.errors import Denied, ForebayError, Invalid
from forebay.core.oidc import Issuer

SESSIONS_KEPT_MAX: Final = 1024
TOKEN_CHARACTERS_MAX: Final = 8192  # the longest subject and all rules that an issuer may have: 5,000
_MAC_BYTES: Final = 32


class _Said(msgspec.Struct, array_like=True, frozen=True):
    issuer: bytes
    subject: str
    from_s: int
    until_s: int
    rules: tuple[bytes, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Said).decode


class Session(NamedTuple):
    """Temporary keys. `identity.until_s` is when they end, Unix time."""

    key_id: str
    secret: str
    token: bytes
    identity: Identity

    def __repr__(self) -> str:
        return f"Session({self.key_id!r}, {self.identity!r})"


class Sessions:
    """Makes and opens session tokens under `secret`, for these issuers as they are now."""

    def __init__(self, secret: bytes = b"", issuers: Iterable[Issuer] = ()) -> None:
        self._secret = secret
        self._issuers = {issuer.mark: issuer for issuer in issuers}
        self._known: dict[bytes, Session] = {}

    def make(self, issuer: Issuer, subject: str, rules: Iterable[bytes], from_s: int, until_s: int) -> Session:
        """Keys for `subject`, from whole second `from_s` until `until_s`. `Denied` if the rules allow nothing."""
        text = _encode(_Said(issuer.mark, subject, from_s, until_s, tuple(rules)))
        return self._session(base64.urlsafe_b64encode(self._mac(b"token", text) + text))

    def open(self, token: bytes) -> Session:
        """The keys that belong to a session token, also if their time is over. `Invalid` (`InvalidToken`) for what was
        not made here, or is worth nothing any more; `Denied` for what somebody ended."""
        found = self._known.get(token)
        if found is None:
            found = self._session(token)
            if len(self._known) >= SESSIONS_KEPT_MAX:
                self._known.clear()
            self._known[token] = found
        return found

    def _session(self, token: bytes) -> Session:
        if not self._issuers:
            raise _no_token("this node issues no session tokens: use a key alone")
        try:
            if len(token) > TOKEN_CHARACTERS_MAX:
                raise ValueError
            raw = base64.b64decode(token, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise _no_token("it is none of this node") from None
        mac, text = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(b"token", text)):
            raise _no_token("it is none of this node")
        said = _decode(text)
        issuer = self._issuers.get(said.issuer)
        if issuer is None:
            raise _no_token("its issuer is not trusted any more")
        key_id = "FBT" + base64.b32encode(self._mac(b"id", text))[:17].decode()
        if issuer.has_ended(said.subject, said.from_s, key_id):
            raise Denied(
                "these temporary keys were ended before their time: get new ones (AssumeRoleWithWebIdentity)",
                code="AccessDenied",
            )
        try:
            until_s = min(said.until_s, said.from_s + issuer.session_s_max)
            identity = issuer.identity(said.subject, said.rules, until_s)
        except Denied:
            raise _no_token("the rules that it was given for are no more") from None
        return Session(key_id, base64.b64encode(self._mac(b"key", text))[:40].decode(), token, identity)

    def _mac(self, purpose: bytes, text: bytes) -> bytes:
        return hmac.digest(self._secret, b"forebay session %b 1\0" % purpose + text, "sha256")


def check_session(session: Session, now_s: float) -> None:
    """Return if the session has not ended: `Invalid` (`ExpiredToken`)."""
    if now_s > session.identity.until_s:
        raise Invalid(
            "The provided token has expired: get new temporary keys (AssumeRoleWithWebIdentity)", code="ExpiredToken"
        )


def _no_token(why: str) -> ForebayError:
    return Invalid(f"The provided token is malformed or otherwise invalid: {why}", code="InvalidToken")
