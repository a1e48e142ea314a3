"""What a node's directory remembers of its last start, so that the next one does not let more in by a slip.

Theory. Whoever types a bare `forebay up` after a node with identities means that node, and would get an open one. So a
node that became ready leaves its settings in DIR/settings.json, and a start that loosens them is refused, with the
flags that are missing. One that repeats or tightens them is not asked anything. Only what decides who gets in is
compared: identities, TLS, and where the node listens.

Rejected: taking the settings of the last start over (a flag that is left out would mean one thing in one directory and
another elsewhere).

Invariants. (1) A start that is refused changes nothing. (2) What is remembered is a start that came to be ready.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from forebay.core.errors import Invalid
from forebay.node.settings import Settings, is_loopback

ANY_ADDRESS = ("0.0.0.0", "::")


class LastStart(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of the settings, those that are compared, and those that are needed to repeat them. Others may stand beside."""

    listen: str = "127.0.0.1"
    identities: str = ""
    identity_key: str = ""
    tls_cert: str = ""
    tls_key: str = ""


def check_not_looser(settings: Settings) -> None:
    """`Invalid` if this start would let in who was not let in at the last one, unless `loosen` says that it may."""
    last = _read(settings.settings_file)
    if last is None or settings.loosen:
        return
    missing: dict[str, str] = {}
    what = []
    if last.identities and not settings.identities:
        what.append("open to everybody")
        missing |= {"--identities": last.identities, "--identity-key": last.identity_key}
    if last.tls_cert and not settings.tls_cert:
        what.append("without TLS")
        missing |= {"--tls-cert": last.tls_cert, "--tls-key": last.tls_key}
    if _reaches_further(settings.host, msgspec.structs.replace(settings, listen=last.listen, identities="-").host):
        what.append(f"listening at {settings.host}")
        missing["--listen"] = last.listen
    if what:
        flags = " ".join(f"{flag} {value}" for flag, value in missing.items() if value)
        raise Invalid(
            f"this start would leave the node of {settings.dir} {' and '.join(what)}, which it was not at its last "
            f"start: add {flags}; or add --loosen if it is meant"
        )


def _reaches_further(host: str, last: str) -> bool:
    """Whether others than before could connect."""
    return host != last and last not in ANY_ADDRESS and not is_loopback(host)


def remember(settings: Settings) -> None:
    """The node is ready with these settings."""
    path = settings.settings_file
    kept = LastStart(settings.listen, settings.identities, settings.identity_key, settings.tls_cert, settings.tls_key)
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(kept))
    os.replace(new, path)


def _read(path: Path) -> LastStart | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=LastStart)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise Invalid(f"{path} cannot be read ({error}): it says what may get in; mend it, or delete it") from None
