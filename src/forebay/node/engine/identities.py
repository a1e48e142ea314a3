"""The identities file as the engine follows it: read at the start, and again when it changes.

Theory. The engine checks the file every few seconds. `forebay key` replaces it whole, so each read sees one state of
it. A file that breaks or disappears after the start changes nothing: locking everybody out, or letting everybody in,
because of an editor's slip would be worse than yesterday's identities. The engine tries again each time, and logs the
problem once for each state of the file. At the start it is an error.

Invariants. (1) `encoded` is empty only for a node without identities. (2) A secret is only in memory and on the
engine's socket, whose directory belongs to its user alone; it is never logged.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Sequence
from pathlib import Path

from forebay.core.access import OIDC_NAMES, Identity, encode_identities
from forebay.core.errors import ForebayError, Invalid
from forebay.core.keyfile import KeyFile, identities_of, parse
from forebay.core.oidc import Issuer

log = logging.getLogger("forebay.identities")


class IdentitiesFile:
    """`path` is the file, "" for a node without identities; `key_path` is the private key of its seals, or "". `also`
    are let in besides those of the file."""

    def __init__(self, path: str, key_path: str = "", also: Sequence[Identity] = ()) -> None:
        self._also = tuple(also)
        self.encoded = b""
        self.oidc: tuple[Issuer, ...] = ()
        self._file = KeyFile(())
        self._path = Path(path) if path else None
        self._key_path = key_path
        self._seen: tuple[int, ...] = ()  # the state of the file that was read last
        self._told: tuple[int, ...] = ()  # the state whose problem was logged last

    def read(self, *, anew: bool = False) -> bool:
        """Read the file if it changed, or `anew`; return whether the identities changed. `Invalid` only before any were
        read."""
        if self._path is None:
            return False
        if anew:
            self._seen = self._told = ()
        try:
            at = self._path.stat()
        except OSError as error:
            return self._keep((0,), Invalid(f"{self._path} cannot be read ({error.strerror}): check --identities"))
        seen = (at.st_mtime_ns, at.st_size, at.st_ino)
        if seen == self._seen:
            return False
        try:
            encoded, file = self._load(at.st_mode)
        except ForebayError as error:
            return self._keep(seen, error)
        self._seen = seen
        changed = (encoded, file.oidc) != (self.encoded, self.oidc)
        if changed and self.encoded:
            log.info("the identities in %s are others now: %s", self._path, _changes(self._file, file))
        self.encoded, self.oidc, self._file = encoded, file.oidc, file
        return changed

    def _load(self, mode: int) -> tuple[bytes, KeyFile]:
        assert self._path is not None
        try:
            file = parse(self._path.read_bytes())
            if not file.is_sealed:
                if stat.S_IMODE(mode) & 0o077 and any(entry.secret_access_key for entry in file.identities):
                    log.warning("%s can be read by other users, and its secrets are not sealed: chmod 600", self._path)
                return encode_identities([*identities_of(file, _never), *self._also]), file
            if not self._key_path:
                raise Invalid(
                    "its secrets are sealed: give the key with --identity-key FILE, or as the systemd credential "
                    "forebay-identity-key"
                )
            from forebay.node.sealed_secrets import read_key  # 20 ms to import, and few nodes need it

            found = identities_of(file, read_key(Path(self._key_path)).open)
            return encode_identities([*found, *self._also]), file
        except OSError as error:
            raise Invalid(f"{self._path} cannot be read ({error.strerror}): check --identities") from None
        except Invalid as error:
            raise Invalid(f"the identities file {self._path}: {error.message}") from None

    def _keep(self, seen: tuple[int, ...], problem: ForebayError) -> bool:
        if not self.encoded:
            raise problem
        if seen != self._told:
            log.error("the identities stay as they were: %s", problem)
            self._told = seen
        return False


def _changes(old: KeyFile, new: KeyFile) -> str:
    """What differs, by name."""
    before, after = _by_name(old), _by_name(new)
    known = {(issuer.name, one) for issuer in old.oidc for one in issuer.ended}
    ended = [
        one.access_key_id or f"{OIDC_NAMES}{issuer.name}:{one.subject}"
        for issuer in new.oidc for one in issuer.ended if (issuer.name, one) not in known
    ]  # fmt: skip
    kinds = {
        "new": [name for name in after if name not in before],
        "gone": [name for name in before if name not in after],
        "changed": [name for name in after if name in before and after[name] != before[name]],
        "ended": list(dict.fromkeys(ended)),
    }
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names) or "the key alone"


def _by_name(file: KeyFile) -> dict[str, object]:
    return {entry.name: entry for entry in file.identities} | {issuer.name: issuer for issuer in file.oidc}


def _never(sealed: str, key_id: str) -> str:
    raise AssertionError("a file that is not sealed has nothing to open")
