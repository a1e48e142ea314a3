"""The node's certificate: read, judged, and followed while the node runs.

Theory. Certificate and key are two files that somebody else replaces (a renewal, a mounted secret), perhaps one a
moment after the other. So each front looks at them once a second, takes what it finds only when it stayed the same for
two looks and fits together, and otherwise stays with what it has and says so once. At SIGHUP it reads them at once. A
connection keeps the context it began with; new ones get the new certificate. Nothing restarts and nobody is cut off.

What a client would refuse is refused at the start with words that say which file is wrong and how: a certificate that
is no PEM, that is not of this key, that has expired, or a key with a pass phrase (nobody would be there to type it).

Rejected: TLS 1.0 and 1.1 (broken; every client of the last ten years speaks 1.2); client certificates (identities have
keys and tokens; a second way to prove would need its own rules); SIGHUP as the only way to have a new certificate read
(a renewal that forgets it is found when the old one expires).

Invariants. (1) `context` is always one that a handshake succeeds with, but for the certificate's age. (2) A key is
never logged.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable
from datetime import UTC, datetime

from forebay.core.errors import Invalid
from forebay.node.settings import Settings
from forebay.ports import clock

log = logging.getLogger("forebay.tls")

SOON_S = 14 * 86400  # a certificate that ends within this is complained of whenever it is read


class TlsFiles:
    """The context of a certificate file (with its chain) and a key file ("": the key stands in the same file), both
    PEM. `Invalid` says what is wrong with them."""

    def __init__(self, cert: str, key: str = "", *, wall_s: Callable[[], float] = clock.wall_s) -> None:
        self._cert, self._key = cert, key
        self._wall_s = wall_s
        self._seen = self._used = self._state()
        self.context = self._load()

    def follow(self, *, anew: bool = False) -> None:
        """Look whether the files changed; call once a second. Keeps the context if they cannot be used. `anew`: read
        them now, as if they had changed."""
        state = self._state()
        settled, self._seen = state == self._seen, state
        if not anew and (not settled or state == self._used):
            return
        self._used = state  # whatever comes of it: it is said once
        try:
            self.context = self._load()
            log.info("a new certificate is in use: %s", self._cert)
        except Invalid as error:
            log.error("the certificate stays as it was: %s", error)

    def _state(self) -> tuple[tuple[int, ...], ...]:
        found: list[tuple[int, ...]] = []
        for path in (self._cert, self._key or self._cert):
            try:
                at = os.stat(path)
                found.append((at.st_mtime_ns, at.st_size, at.st_ino))
            except OSError as error:
                found.append((error.errno or 0,))
        return tuple(found)

    def _load(self) -> ssl.SSLContext:
        for path, flag in ((self._cert, "--tls-cert"), (self._key, "--tls-key")):
            try:
                if path:
                    open(path, "rb").close()
            except OSError as error:
                raise Invalid(f"{flag} {path} cannot be read: {error.strerror}") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._cert, self._key or None, self._no_pass_phrase)
        except ssl.SSLError as error:
            raise Invalid(self._why(error)) from None
        self._check_age()
        return context

    def _no_pass_phrase(self) -> str:
        raise Invalid(
            f"the TLS key {self._key or self._cert} has a pass phrase: give one without (`openssl pkey` removes it), "
            "readable by the node's user only"
        )

    def _why(self, error: ssl.SSLError) -> str:
        key = self._key or self._cert
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"--tls-key {key} is not the key of --tls-cert {self._cert}: give two that belong together"
        if not self._key:
            return f"--tls-cert {key} does not hold both a certificate and its key as PEM: give --tls-key FILE too"
        what = "a certificate" if not self._certificate_end() else "its private key"
        where = f"--tls-cert {self._cert}" if what == "a certificate" else f"--tls-key {self._key}"
        return f"{where} does not hold {what} as PEM ({error.reason or error})"

    def _certificate_end(self) -> datetime | None:
        """When the certificate ends; None if the file does not hold one."""
        from cryptography import x509

        try:
            with open(self._cert, "rb") as file:
                return x509.load_pem_x509_certificates(file.read())[0].not_valid_after_utc
        except (ValueError, OSError):
            return None

    def _check_age(self) -> None:
        end = self._certificate_end()
        if end is None:
            return  # OpenSSL took it: its age is for the clients to judge
        left_s = end.timestamp() - self._wall_s()
        if left_s <= 0:
            raise Invalid(f"the certificate {self._cert} expired on {_day(end)}: renew it, or set the clock right")
        if left_s < SOON_S:
            log.warning("the certificate %s expires on %s: renew it", self._cert, _day(end))


def tls_files(settings: Settings, wall_s: Callable[[], float] = clock.wall_s) -> TlsFiles | None:
    """The node's certificate; None for one without TLS. `Invalid` as `TlsFiles`."""
    return TlsFiles(settings.tls_cert, settings.tls_key, wall_s=wall_s) if settings.tls_cert else None


def _day(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
