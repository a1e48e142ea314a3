"""How a verb ends: its exit code, and one line with what went wrong and what to do next.

Theory. A verb is a plain function that returns nothing or an exit code, and raises `core.errors` kinds. `verb` wraps
it, and only `verb` turns an error into text and a number. Scripts act on the number or, with `--json`, on the kind;
people read the line. `--debug` prints the traceback.

Invariants. (1) Errors go to standard error, as one line of text or one line of JSON. (2) Every kind of error has an
exit code, and docs/cli.md lists them (a test compares).
"""

from __future__ import annotations

import errno
import functools
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from forebay.core.errors import KINDS, ForebayError, NotSupported

EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_PARTIAL = 9
EXIT_LOCAL = 10
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells say it
EXIT_PIPE = 141  # 128 + SIGPIPE

EXITS: dict[str, int] = {
    "Bug": EXIT_BUG,
    "Invalid": EXIT_USAGE,
    "NotFound": 3,
    "Denied": 4,
    "Exists": 5,
    "Precondition": 5,
    "Busy": 6,
    "Unavailable": 6,
    "NoBackendBucket": 6,
    "VolumeMissing": 6,
    "Closed": 6,
    "ObjectLost": 7,
    "Corrupt": 7,
    "NotSupported": 8,
    "Partial": EXIT_PARTIAL,
    "Local": EXIT_LOCAL,
    "Interrupted": EXIT_INTERRUPTED,
}
assert set(KINDS) <= set(EXITS), "every kind of error has an exit code"


class Partial(ForebayError):
    """Some of the work is done and some failed; what failed was named. Run the same command again for the rest."""


class Local(ForebayError):
    """This machine's file system or process limits said no. Change the target, the rights or the limit."""


class Interrupted(ForebayError):
    """Ctrl-C. The message says what is kept."""


F = TypeVar("F", bound=Callable[..., Any])


def verb(function: F) -> F:
    """Wrap a verb: its errors become a line and an exit code. `as_json` and `debug` among its arguments are heeded."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        debug = bool(kwargs.get("debug")) or os.environ.get("FOREBAY_DEBUG", "") not in ("", "0")
        try:
            code = function(*args, **kwargs)
        except BrokenPipeError:
            quiet_stdout()
            code = EXIT_PIPE
        except (ForebayError, OSError, KeyboardInterrupt) as error:
            if debug:
                traceback.print_exc()
            code = tell(as_forebay(error), as_json=bool(kwargs.get("as_json")))
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:
            if type(error).__module__.startswith(("typer", "click")):
                raise
            if debug:
                traceback.print_exc()
            code = tell(unexpected(error), as_json=bool(kwargs.get("as_json")))
        raise typer.Exit(int(code or 0))

    return run  # type: ignore[return-value]


_WHAT_TO_DO = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "name a file",
    errno.EACCES: "change its rights, or choose another path",
    errno.EPERM: "change its rights, or choose another path",
    errno.EROFS: "choose a path that can be written",
    errno.ENOSPC: "free some space, or choose another path",
    errno.EDQUOT: "free some space, or choose another path",
}


def check_installed(*packages: str, extra: str) -> None:
    """`NotSupported` unless all are here: a verb that needs them begins with this."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise NotSupported(
                f"this needs {package}, which is not here: pip install '.[{extra}]' in a checkout of forebay"
            )


def as_forebay(error: BaseException) -> ForebayError:
    """The error as one of ours."""
    if isinstance(error, ForebayError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted")
    assert isinstance(error, OSError)
    where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
    why = error.strerror or str(error) or type(error).__name__
    return Local(f"{where}{why}: {_WHAT_TO_DO.get(error.errno or 0, 'choose another path, or mend it')}")


def unexpected(error: Exception) -> ForebayError:
    """What to say of an error nobody foresaw."""
    from forebay.core.errors import Bug

    return Bug(
        f"unexpected {type(error).__name__}: {error}; please report it with the traceback that the same command "
        "prints with --debug"
    )


def exit_code(error: ForebayError) -> int:
    return EXITS.get(error.kind, EXIT_BUG)


def tell(error: ForebayError, *, as_json: bool) -> int:
    """Print the error; its exit code."""
    code = exit_code(error)
    if as_json:
        import msgspec

        said = {"kind": error.kind, "message": error.message, "code": error.code, "exit_code": code}
        line = msgspec.json.encode({"error": said}).decode()
    else:
        line = f"forebay: {one_line(error.message)}"
    print(line, file=sys.stderr, flush=True)
    return code


def one_line(text: str) -> str:
    """`text` with control characters replaced, so that a name in it cannot steer the terminal."""
    return "".join(c if c.isprintable() else " " if c in "\n\r\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def quiet_stdout() -> None:
    """Let nothing more reach a standard output that nobody reads (Python would complain at exit)."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        pass
