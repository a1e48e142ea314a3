"""Translates a backend's errors into `core.errors` kinds.

Theory. A backend fails in one of three ways: obstore raises an exception whose text carries the HTTP status and the
body; a request of our own (`http/requests.py`) gets an HTTP error; a disk or a socket raises `OSError`. Each becomes
the same facts (status, the service's code, text), and one table maps those to a kind. obstore gives the status only in
its message, so an expression anchored on obstore's words reads it there. An unknown text becomes `Unavailable`, which
is retried: a needless retry costs a request, a wrong "not found" would be a lie.

Invariants. (1) Only `core.errors` kinds leave this room. (2) A 404 is `NotFound` only if the backend says that an
object or an upload is missing; a missing bucket is `NoBackendBucket`. (3) No message holds a credential: it quotes at
most `BODY_CHARS_MAX` characters of an answer, and never request headers.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from obstore import exceptions as obstore_errors

from forebay.core import limits
from forebay.core.errors import (
    KINDS,
    Busy,
    Corrupt,
    Denied,
    ForebayError,
    Invalid,
    NoBackendBucket,
    NotFound,
    NotSupported,
    Precondition,
    Unavailable,
    map_changes,
)
from forebay.core.types import AGAIN_STATUS, LOOP_STATUS

BODY_CHARS_MAX = 300  # enough for the code and message of every cloud's error document

_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})[^:]*: ?(.*?)(?:\n\nDebug source:|\Z)", re.DOTALL)
_CODE = re.compile(r"<Code>([A-Za-z0-9]+)</Code>")
_TEXT = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_REGION = re.compile(r"<Region>([a-z0-9-]+)</Region>")
_ENDPOINT = re.compile(r"<Endpoint>([A-Za-z0-9.:/-]+)</Endpoint>")

_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "ContainerDisabled"}
_BUSY_CODES = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "ServerBusy", "TooManyRequests"}
_DENIED_CODES = {
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "AuthenticationFailed",
    "InvalidAuthenticationInfo",
    "RequestTimeTooSkewed",
    "AuthorizationHeaderMalformed",
}
# A body that does not match the checksum that was sent with it.
_DAMAGED_CODES = {"BadDigest", "Md5Mismatch", "XAmzContentSHA256Mismatch"}
_DAMAGED_TEXT = "Provided contentMD5 doesn't match"  # Azurite says it with the code of any refused request
# Answers below 500 that pass, and did nothing: a body that came too slowly, and two writes that met.
_PASSING_CODES = {"RequestTimeout", "ConditionalRequestConflict", "OperationAborted", "IncompleteBody"}
# obstore's words for a range that the answer does not have; "0--1/0" is how some servers say it of an empty object.
_OUT_OF_RANGE = ("Requested range was invalid", "Wanted range starting at", "bytes 0--1/0")
# obstore says "error sending request" for all of these, and the cause only in the depth of its message.
_CAUSES = {
    "InvalidCertificate": "the server's certificate is not trusted: set the option root_certificate to its authority",
    "dns error": "the host name is not known: check the endpoint",
    "ConnectionRefused": "the connection is refused: check that the server runs, and the endpoint's port",
    "TimedOut": "no answer in time: check the endpoint and the network",
    "ConnectionReset": "the connection was reset: try again",
    "IncompleteMessage": "the connection was closed before the answer: try again",
}
# What our own credential providers raised comes back through obstore as text.
_PROVIDER = re.compile(r"credential provider: ([A-Z][A-Za-z]+): (.*?)(?:\n\nDebug source:|\Z)", re.DOTALL)


class NotDone(Unavailable):
    """`Unavailable`, and it is certain that nothing was done."""

    @property
    def kind(self) -> str:
        return Unavailable.__name__


def from_obstore(error: BaseException, what: str) -> ForebayError:
    """The kind that an exception of obstore's (or one raised beneath it) stands for. `what`: the URL in question."""
    if isinstance(error, ForebayError):
        return error
    text = str(error)
    found = _STATUS.search(text)
    if found:
        return from_status(int(found[1]), found[2], what)
    provider = _PROVIDER.search(text)
    if provider and provider[1] in KINDS:
        return KINDS[provider[1]](f"{what}: {provider[2].strip()}")
    if isinstance(error, FileNotFoundError):
        return _not_found(text, what)
    if isinstance(error, (obstore_errors.PermissionDeniedError, obstore_errors.UnauthenticatedError, PermissionError)):
        return _denied(_quote(text), what)
    if isinstance(error, obstore_errors.PreconditionError):
        return changed(what)
    if isinstance(error, obstore_errors.NotSupportedError):
        return NotSupported(f"{what}: the backend does not do this ({_quote(text)})")
    if isinstance(error, (obstore_errors.InvalidPathError, ValueError, obstore_errors.UnknownConfigurationKeyError)):
        return Invalid(f"{what}: {_quote(text)}; change the name or option", code="InvalidURI")
    if any(words in text for words in _OUT_OF_RANGE):
        return out_of_range(what)
    if "redirect without LOCATION" in text:
        return Invalid(f"{what}: the bucket is in another region: set the bucket's option region")
    for sign, said in _CAUSES.items():
        if sign in text:
            return Unavailable(f"{what}: {said}")
    return Unavailable(f"{what}: the backend does not answer ({_quote(text)}): check the endpoint and the network")


def cannot_tell(error: BaseException) -> bool:
    """Whether obstore had an answer and gave it up, because metadata in it is not ASCII."""
    return "contained non UTF-8 characters" in str(error)


def wait_s(said: str, date: str) -> float:
    """Seconds of a Retry-After header, which may be a time by the server's clock (`date`); 0 for what is neither."""
    if said.isascii() and said.isdigit():
        return min(float(said), limits.RETRY_AFTER_MAX_S)
    try:
        ahead_s = (parsedate_to_datetime(said) - parsedate_to_datetime(date)).total_seconds()
    except (ValueError, TypeError):
        return 0.0
    return min(max(ahead_s, 0.0), limits.RETRY_AFTER_MAX_S)


def from_status(
    status: int, body: str, what: str, headers: Mapping[str, str] | None = None, *, wrote: bool = False
) -> ForebayError:
    """The kind that an HTTP answer stands for; `body` is its text, `headers` have lower-case names where known.
    `wrote`: it answers a write. Then a 503 that no service's own code explains is no `Busy`, which says that nothing
    was done: proxies send it when the answer from behind did not come."""
    failed = _kind_of(status, body, what, wrote)
    if headers and failed.retry != "never":
        failed.retry_after_s = wait_s(headers.get("retry-after", ""), headers.get("date", ""))
    return failed


def said_of_node(failed: ForebayError, node: str) -> None:
    """Name the node where the error names the backend: it stands in the backend's place. A HEAD brings no reason."""
    text = failed.message.replace("the backend asks to slow down", f"{node} cannot answer now")
    text = text.replace("the backend", node)
    for bare in ("(HTTP 503 : )", f"(HTTP {AGAIN_STATUS} : )"):
        text = text.replace(
            bare, "(it starts, is busy, or does not know the cluster's map yet: `forebay status` tells)"
        )
    failed.message = text if node in text else f"{node} cannot be asked: {text}"


def _kind_of(status: int, body: str, what: str, wrote: bool) -> ForebayError:
    code_found = _CODE.search(body)
    code = code_found[1] if code_found else ""
    said = f"HTTP {status} {code}: {_quote(body)}"
    if status == AGAIN_STATUS:
        return map_changes(f"{what}: the backend does not act on it now ({said}): try again", retry_after_s=0.25)
    # The code is a node's too, that cannot say whether it was done.
    if status == 503 and (code == "ServiceUnavailable" or (wrote and code not in _BUSY_CODES)):
        return Unavailable(f"{what}: the backend could not answer ({said}): try again later")
    if status in (429, 503) or code in _BUSY_CODES:
        return Busy(f"{what}: the backend asks to slow down ({said}): try again later")
    if status == 404:
        return _not_found(body, what)
    if status == LOOP_STATUS:
        return ourselves(what)
    if status == 416:
        return out_of_range(what)
    if status in (304, 412):
        return changed(what)
    region, endpoint = _REGION.search(body), _ENDPOINT.search(body)
    if status in (301, 307, 308) or (status == 400 and region):
        where = f"region {region[1]}" if region else f"endpoint {endpoint[1]}" if endpoint else "another region"
        return Invalid(f"{what}: the bucket is at {where}: set the bucket's option region or endpoint", code=code)
    if status in (401, 403) or (status == 400 and code in _DENIED_CODES):
        return _denied(said, what)
    if code in _DAMAGED_CODES or (status == 400 and _DAMAGED_TEXT in body):
        return Corrupt(f"{what}: the body was damaged on its way ({said}): send it again")
    if code in _PASSING_CODES:
        return NotDone(f"{what}: the backend could not finish ({said}): try again")
    if status in (405, 501):
        return NotSupported(f"{what}: the backend does not do this ({said})")
    if 400 <= status < 500 and status != 408:
        return Invalid(f"{what}: the backend refused the request ({said})", code=code)
    return Unavailable(f"{what}: the backend failed ({said}): try again")


def from_os(error: OSError, what: str) -> ForebayError:
    """The kind that an error of the local disk, or of a socket of ours, stands for."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return no_such_key(what)
    if isinstance(error, PermissionError):
        return _denied(str(error), what)
    if isinstance(error, TimeoutError | socket.timeout):
        return Unavailable(f"{what}: no answer in time: check the endpoint and the network")
    return Unavailable(f"{what}: {error}: check the endpoint, the network or the disk")


def not_connected(error: OSError, what: str) -> ForebayError:
    """As `from_os`, for a connection that did not come about."""
    found = from_os(error, what)
    return NotDone(found.message) if isinstance(found, Unavailable) else found


def not_described(error: ForebayError, what: str) -> Unavailable:
    """What is raised in the place of the error of a look at something that was written just before: `error` may say
    that nothing was done, and means the look."""
    return Unavailable(
        f"{what}: it was written, and the backend does not say what it has now ({error.message}): look before you "
        "write it again"
    )


def no_such_key(what: str) -> NotFound:
    """The object does not exist."""
    return NotFound(f"{what} does not exist: check the key", code="NoSuchKey")


def not_that_version(what: str, said: str) -> NotSupported:
    """The answer does not say that it is the version that was named."""
    return NotSupported(f"{what}: the backend answered with version {said[:100]!r}: does it keep versions?")


def no_such_bucket(what: str) -> NoBackendBucket:
    """The bucket itself does not exist at the backend."""
    return NoBackendBucket(
        f"{what}: there is no such bucket at the backend: bring it back (is it mounted?), or correct the bucket's URL"
    )


def ourselves(what: str) -> NoBackendBucket:
    """The request came back to the node that made it."""
    return NoBackendBucket(
        f"{what} is this node itself, which needs another backend: name it with `forebay bucket set NAME --option "
        "endpoint=URL`; or, if AWS_ENDPOINT_URL was set where the node was started, start it again without: `forebay "
        "down`, then `env -u AWS_ENDPOINT_URL forebay up`",
        code="OwnBackend",
    )


def says_what_is_missing(error: BaseException | None) -> bool:
    """Whether the answer behind an exception of obstore's has a service's own code: a bare 404 does not tell whether
    the object is missing or its bucket."""
    return _CODE.search(str(error)) is not None


def no_such_upload(what: str) -> NotFound:
    """The upload was completed or aborted, or never was."""
    return NotFound(
        f"{what}: there is no such upload (any more): look at the object, or begin anew", code="NoSuchUpload"
    )


def check_part_number(number: int) -> None:
    """`Invalid` for a part number that no service takes."""
    if not 1 <= number <= limits.PARTS_MAX:
        raise Invalid(f"part number {number} is not one of 1 to {limits.PARTS_MAX}", code="InvalidArgument")


def expects_nothing(what: str) -> Invalid:
    """A delete was asked for on the condition that there is nothing to delete."""
    return Invalid(f"{what}: a delete cannot expect that there is nothing: leave the condition out")


def exists(what: str) -> Precondition:
    """The object is there, and the write expected that it is not."""
    return Precondition(f"{what} exists already: read it, or write without the condition", code="PreconditionFailed")


def changed(what: str) -> Precondition:
    """The object is another version now than the one asked for."""
    return Precondition(f"{what} has changed at the backend: open it again", code="PreconditionFailed")


def out_of_range(what: str, size_bytes: int | None = None) -> Invalid:
    """The range lies outside the object; `size_bytes` where it is known."""
    return Invalid(
        f"{what}: the range is outside the object: ask within its size", code="InvalidRange", size_bytes=size_bytes
    )


def ended_early(what: str, got_bytes: int, wanted_bytes: int) -> Unavailable:
    """A body stopped before its end."""
    return Unavailable(f"{what}: the body ended after {got_bytes} of {wanted_bytes} bytes: read the rest again")


def _not_found(body: str, what: str) -> ForebayError:
    code = _CODE.search(body)
    if code and code[1] in _NO_BUCKET:
        return no_such_bucket(what)
    return no_such_key(what)


def _denied(said: str, what: str) -> Denied:
    return Denied(f"{what}: the backend denies access ({said}): check credentials and rights", code="AccessDenied")


def _quote(body: str) -> str:
    message = _TEXT.search(body)
    text = message[1] if message else body.split("\n\nDebug source:")[0]
    return " ".join(text.split())[:BODY_CHARS_MAX]
