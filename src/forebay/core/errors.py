"""The kinds of errors, and what a caller should do about each.

Theory. A caller acts on the *kind* of an error, never on its message. So there are few kinds, split only where a caller
would act differently. Each kind carries two facts: whether trying again can help (`retry`), and its HTTP status
(`status`). The message is for people and ends with what to do next. Each edge translates with one table:
`backends/errors.py` (obstore's exceptions to ours), `node/front/native/api.py` and `node/front/s3/operations.py` (ours
to HTTP and S3 codes).

Rejected: one class per situation (callers cannot keep up with the list); bare status codes (meaningless off HTTP).

Invariants. (1) `kind` is the class name and is unique. (2) Every error survives `to_wire` and `from_wire`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

Retry = Literal["never", "same", "another", "later"]
MAP_CHANGES = "MapChanges"  # the code of an error that says: nothing was done, for who acts on the key changes


class ErrorOnWire(msgspec.Struct, array_like=True, frozen=True):
    """An error as it travels between processes."""

    kind: str
    message: str
    code: str = ""
    retry_after_s: float = 0.0
    size_bytes: int | None = None


class ForebayError(Exception):
    """Base of every error Forebay raises on purpose. Catch the kinds below, not the messages.

    `code` is an optional finer word for the edges that need one (an S3 error code such as `NoSuchBucket`);
    `retry_after_s` is how long to wait first when `retry` is `later`; `size_bytes` is the object's size where the
    code is `InvalidRange` and the size is known (HTTP says it in Content-Range).
    """

    retry: ClassVar[Retry] = "never"
    status: ClassVar[int] = 500

    def __init__(
        self, message: str, *, code: str = "", retry_after_s: float = 0.0, size_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.retry_after_s = retry_after_s
        self.size_bytes = size_bytes

    @property
    def kind(self) -> str:
        return type(self).__name__

    def to_wire(self) -> ErrorOnWire:
        return ErrorOnWire(self.kind, self.message, self.code, self.retry_after_s, self.size_bytes)


class NotFound(ForebayError, FileNotFoundError):
    """The bucket, object or thing named does not exist. Check the name; retrying does not help."""

    status = 404

    def __str__(self) -> str:
        return self.message


class Exists(ForebayError):
    """The thing to be made is there already. Choose another name, or change the one that exists."""

    status = 409


class Precondition(ForebayError):
    """A condition the caller set does not hold, or the object changed under an open handle. Read again, decide anew."""

    status = 412


class Denied(ForebayError):
    """The caller may not do this, here or at the backend. Fix credentials or policy."""

    status = 403


class Invalid(ForebayError):
    """The request is malformed or breaks a documented limit. Change the request."""

    status = 400


class Busy(ForebayError):
    """A limit is reached for now. Try again after `retry_after_s`."""

    retry = "later"
    status = 503


class Unavailable(ForebayError):
    """The backend, a node or a disk does not answer. Try again later, or elsewhere."""

    retry = "another"
    status = 503


class NoBackendBucket(Unavailable):
    """What is behind a bucket (a cloud's bucket or container, a directory) is not there, so nothing is known of its
    objects. Bring it back (mount it), or correct the bucket's URL. Asking once more at once does not help."""


class VolumeMissing(ForebayError):
    """What only this node has of it may be on a volume that is not here. Bring the volume back, or give it up.

    Not an `Unavailable`: nothing may be served or written in its place, from the backend neither.
    """

    retry = "another"
    status = 503


class ObjectLost(ForebayError):
    """Acknowledged bytes that no backend has are gone from their disk. Write the object again, delete it, or give it
    up."""

    status = 500


class Corrupt(ForebayError):
    """Bytes do not match their checksum or declared size, and no good copy was found. Nothing wrong was returned."""

    retry = "another"
    status = 502


class Closed(ForebayError):
    """The node or client is shutting down. Connect again."""

    retry = "another"
    status = 503


class NotSupported(ForebayError):
    """Forebay does not do this, and says so rather than pretend. See docs/semantics.md for what is served."""

    status = 501


class Bug(ForebayError):
    """An invariant of Forebay's own is broken. Please report it with the message and the node's log."""

    status = 500


KINDS: dict[str, type[ForebayError]] = {
    kind.__name__: kind
    for kind in (
        NotFound,
        Exists,
        Precondition,
        Denied,
        Invalid,
        Busy,
        Unavailable,
        NoBackendBucket,
        VolumeMissing,
        ObjectLost,
        Corrupt,
        Closed,
        NotSupported,
        Bug,
    )
}


def map_changes(message: str, retry_after_s: float) -> Busy:
    """Nothing was done, for certain, since who acts on the key changes: whoever was asked by a client asks again, by
    the map of then (`node/engine/asking.py`)."""
    return Busy(message, code=MAP_CHANGES, retry_after_s=retry_after_s)


def from_wire(error: ErrorOnWire) -> ForebayError:
    """The exception an `ErrorOnWire` stands for; an unknown kind (a newer peer) becomes `Bug`, message kept."""
    return KINDS.get(error.kind, Bug)(
        error.message, code=error.code, retry_after_s=error.retry_after_s, size_bytes=error.size_bytes
    )
