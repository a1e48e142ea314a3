"""Which options of a bucket's backend are secret, and when a secret that nobody sees may stay in use.

Theory. An answer shows HIDDEN in place of a secret, and whoever changes the bucket sends HIDDEN back: the secret stays
as it was. But the other options say where it is sent. If they could change under it, whoever may change the bucket
could have it sent to themselves. So HIDDEN stands for the old secret only while the place stands; a new place needs its
secrets anew. Which options make up the place is not listed, so none is forgotten: all do, but those of _HARMLESS and
the secrets themselves.

Invariants. (1) `with_secrets` of what `hide_secrets` shows is the bucket as it was. (2) No secret goes to a place that
it was not given for.
"""

from __future__ import annotations

from typing import Final

import msgspec

from forebay.core.errors import Invalid
from forebay.core.s3rules.keeping import OPTIONS
from forebay.core.types import Bucket

HIDDEN: Final = "***"  # what is shown in place of a secret
_SECRET_WORDS = ("secret", "token", "password", "key", "sas", "credential", "private")
_HARMLESS = OPTIONS | {"request_payer", "look_before_write"}  # what a request says, not where it goes


def is_secret(name: str, value: str) -> bool:
    """Whether nobody sees the value of this option: by its name, or because it is a URL with a password."""
    if "://" in value and "@" in value:
        return True
    return not name.endswith("key_id") and any(word in name.lower() for word in _SECRET_WORDS)


def hide_secrets(bucket: Bucket) -> Bucket:
    """The bucket without its secrets."""
    shown = {name: HIDDEN if is_secret(name, value) else value for name, value in bucket.options.items()}
    return msgspec.structs.replace(bucket, options=shown)


def with_secrets(bucket: Bucket, old: Bucket | None) -> Bucket:
    """`bucket` with what is hidden as it was in `old`. `Invalid` if that has none, or is another place."""
    before = {} if old is None else old.options
    hidden = [
        name for name, value in bucket.options.items() if value == HIDDEN and is_secret(name, before.get(name, ""))
    ]
    if not hidden:
        return bucket
    for name in hidden:
        if name not in before:
            raise Invalid(f"the option {name} is {HIDDEN}: give its value")
    options = {name: before[name] if name in hidden else value for name, value in bucket.options.items()}
    assert old is not None
    moved = [] if bucket.url == old.url else ["the URL"]
    for name in sorted(options.keys() | before.keys()):
        decides = name not in _HARMLESS and not is_secret(name, "")
        if decides and options.get(name) != before.get(name):
            moved.append(f"the option {name}")
    if moved:
        raise Invalid(
            f"{' and '.join(moved)} would change, and decides where the secret is sent: give {', '.join(hidden)} anew"
        )
    return msgspec.structs.replace(bucket, options=options)
