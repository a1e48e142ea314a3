"""How a backend is to keep an object: in which class of storage, and encrypted with which key.

Theory. A write may say it in headers, and a bucket's options say it for the writes that do not. The headers travel and
are kept with the object's stored headers, so a flush that comes hours later says what its write said. What comes back
from S3 has the same names, and takes their place: a key's alias becomes its ARN. The options are added where a request
leaves for the backend (`backends/`), so they hold for flushes, uploads and copies alike, and a changed option holds for
what leaves after it.

A write that names an encryption gets that one whole: a key of the options does not go with another algorithm.

Rejected: SSE-C (the client's key would go through the node, and the node serves what it keeps to who has none); holding
a class against what S3 has (compatible services have classes of their own; they refuse what they do not know).

Invariant. `kept_as` yields each name once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from forebay.core.errors import Invalid
from forebay.core.types import Headers

STORAGE_CLASS: Final = "x-amz-storage-class"
STANDARD: Final = "STANDARD"  # the class that S3 does not mention
ENCRYPTION: Final = "x-amz-server-side-encryption"
KMS_KEY: Final = "x-amz-server-side-encryption-aws-kms-key-id"
NAMES: Final = (STORAGE_CLASS, ENCRYPTION, KMS_KEY)
_ENCRYPTING: Final = (ENCRYPTION, KMS_KEY)

S3_OPTIONS: Final = {
    "storage_class": "class of what is written, such as STANDARD_IA (default: the backend's)",
    "server_side_encryption": "AES256, aws:kms or aws:kms:dsse for what is written (default: the backend's)",
    "sse_kms_key_id": "key for aws:kms: id, ARN or alias",
}
GOOGLE_OPTIONS: Final = {"storage_class": "STANDARD, NEARLINE, COLDLINE or ARCHIVE for what is written"}
AZURE_OPTIONS: Final = {"access_tier": "Hot, Cool, Cold or Archive for what is written"}
OPTIONS: Final = frozenset({*S3_OPTIONS, *AZURE_OPTIONS})

_WORD: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KEY: Final = re.compile(r"[!-~]{1,2048}")
_ALGORITHMS: Final = ("AES256", "aws:kms", "aws:kms:dsse")


def check_encryption(algorithm: str, key: str) -> None:
    """`Invalid` (`InvalidArgument`) unless S3 knows the algorithm, and the key goes with it; "" for none."""
    if algorithm and algorithm not in _ALGORITHMS:
        raise Invalid(
            f"the encryption {algorithm[:60]!r} is not known: use one of {', '.join(_ALGORITHMS)}",
            code="InvalidArgument",
        )
    if key and (not _KEY.fullmatch(key) or not algorithm.startswith("aws:kms")):
        raise Invalid("a KMS key goes with the encryption aws:kms or aws:kms:dsse", code="InvalidArgument")


def keeping_of(options: Mapping[str, str]) -> Headers:
    """What a bucket's options say, as headers. `Invalid`."""
    word = options.get("storage_class") or options.get("access_tier", "")
    algorithm, key = options.get("server_side_encryption", ""), options.get("sse_kms_key_id", "")
    if word and not _WORD.fullmatch(word):
        raise Invalid(f"{word[:60]!r} can be no class of storage: write it as STANDARD_IA")
    check_encryption(algorithm, key)
    return tuple(each for each in ((STORAGE_CLASS, word), (ENCRYPTION, algorithm), (KMS_KEY, key)) if each[1])


def keeping_among(headers: Headers) -> Headers:
    """Those of the stored headers that say how the object is kept."""
    return tuple(each for each in headers if each[0] in NAMES)


def without_keeping(headers: Headers) -> Headers:
    """Stored headers but for those."""
    return tuple(each for each in headers if each[0] not in NAMES)


def kept_as(headers: Headers, keeping: Headers) -> Headers:
    """Stored headers of an object that is kept so; how it was kept before is no longer said where `keeping` says it."""
    if not keeping:
        return headers
    said = {name for name, _ in keeping}
    replaced = said.union(_ENCRYPTING) if said.intersection(_ENCRYPTING) else said
    return (*(each for each in headers if each[0] not in replaced), *keeping)
