"""The key by which the nodes of a cluster know each other (`--peer-key`), and who they are to one another.

It stands apart from the engine, which uses it: the supervisor looks at the file before it starts anything, and should
load no engine for that.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from forebay.core.access import PEER_KEY_ID, Grant, Identity
from forebay.core.errors import Invalid

KEY_CHARACTERS_MIN = 32
NAME = "peer-nodes"


def read_secret(path: str) -> str:
    """The secret that nodes derive from the peer key. `Invalid` if the file cannot be used."""
    try:
        key = Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"--peer-key {path} cannot be read ({error}): make it with `openssl rand -hex 32`") from None
    if len(key) < KEY_CHARACTERS_MIN:
        raise Invalid(f"--peer-key {path} is short: make it with `openssl rand -hex 32`, the same on every node")
    return hmac.digest(key.encode(), b"forebay peer nodes 1", hashlib.sha256).hex()


def identity_of_peers(secret: str) -> Identity:
    """Who the other nodes are to this one: they read and write for their clients, whom they have judged."""
    reach = ("*", "-*")  # also what only nodes name
    grants = tuple(Grant(verb, pattern) for verb in ("read", "write") for pattern in reach)
    return Identity(NAME, PEER_KEY_ID, secret, grants=grants)
