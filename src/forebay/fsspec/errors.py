"""Translates our errors into `OSError`s: the one table at this edge.

Theory. Users of fsspec expect `FileNotFoundError`, `PermissionError`, `FileExistsError` and `OSError`, and Python
chooses among them by errno. So each kind of `core.errors` has an errno, and the `OSError` carries our message and the
path. The original error is its `__cause__`, with the kind and the code.

Invariant. Every kind has an errno.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from forebay.client.connection import CUT
from forebay.core.errors import KINDS, ForebayError

ERRNO_OF_KIND = {
    "NotFound": errno.ENOENT,
    "Exists": errno.EEXIST,
    "Precondition": errno.ESTALE,  # it changed under an open file
    "Denied": errno.EACCES,
    "Invalid": errno.EINVAL,
    "Busy": errno.EBUSY,
    "Unavailable": errno.EHOSTUNREACH,
    "NoBackendBucket": errno.EHOSTUNREACH,
    "VolumeMissing": errno.ENODEV,
    "ObjectLost": errno.EIO,
    "Corrupt": errno.EIO,
    "Closed": errno.ESHUTDOWN,
    "NotSupported": errno.EOPNOTSUPP,
    "Bug": errno.EIO,
}
ERRNO_OF_CODE = {"NoNode": errno.ECONNREFUSED, CUT: errno.ECONNRESET}
assert set(ERRNO_OF_KIND) == set(KINDS)


def as_os_error(error: ForebayError, path: str, *, new: bool = False) -> OSError:
    """`error`, about `path`, as an `OSError`. With `new` the condition was that there be nothing."""
    if new and error.kind == "Precondition":
        return FileExistsError(errno.EEXIST, "there is an object of this name: choose another, or overwrite it", path)
    number = ERRNO_OF_CODE.get(error.code) or ERRNO_OF_KIND[error.kind]
    made = OSError(number, error.message, path)
    made.__cause__ = error
    return made


@contextlib.contextmanager
def told(path: str, *, new: bool = False) -> Iterator[None]:
    """What fails inside is raised as an `OSError`."""
    try:
        yield
    except ForebayError as error:
        raise as_os_error(error, path, new=new) from error
