"""A process's log: lines of text or JSON, on standard error or in DIR/log/node.log.

Theory. All processes of a node append to one file, each line by one write, so lines never mix. With `log_to_file` the
file *is* standard error (descriptor 2), so that what a library or a crash says there is kept too. The supervisor puts
the file aside when it is full. Each process looks before each line whether the file is still the one that it has, so it
follows that rotation and anybody else's; SIGHUP has it look at once.

What is logged may come from outside: a key may hold a line break, and so make a line that nobody logged. So control
characters, and what some programs take for line ends, are escaped, and a traceback is indented.

Rejected: each process a file of its own (five files to read for one event); a signal for each rotation (a process that
has not come to its handler would miss it).

Invariants. (1) A record is one line, but for a stack in text, whose lines begin with blanks. (2) A log that cannot
be written never keeps a process from its work.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

from forebay.node.rotated_files import is_at, open_to_append, rotate
from forebay.node.settings import Settings

log = logging.getLogger("forebay")

STDERR = 2
_CONTROLS = [*range(32), *range(127, 160), 0x2028, 0x2029]
_ESCAPES = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _CONTROLS} | {10: "\\n"}


class TextLines(logging.Formatter):
    """Lines for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_ESCAPES)

    def formatException(self, ei: object) -> str:
        return self.formatStack(super().formatException(ei))  # type: ignore[arg-type]

    def formatStack(self, stack_info: str) -> str:
        return "\n".join(f"    {line.translate(_ESCAPES)}" for line in stack_info.split("\n"))


class JsonLines(logging.Formatter):
    """One object a line, for programs; times are UTC. `process` is the process's name."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        said = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "process": self._process,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        if record.stack_info:
            said["stack"] = record.stack_info
        return json.dumps(said)  # nothing but ASCII


class Log(logging.Handler):
    """Writes to standard error. `path` is the file that standard error is to be, None to leave it as it is. `OSError`
    if that cannot be opened."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._path = path
        self._reopen()

    def reopen(self) -> None:
        """Write to the file that is at the path now, from the next line on."""
        try:
            self._reopen()
        except OSError as error:
            log.error("the log %s cannot be opened, and goes on where it was: %s", self._path, error)

    def rotate(self, size_bytes_max: int) -> None:
        """Put the file aside if it has `size_bytes_max` bytes. For one process of the node."""
        try:
            if self._path is None or not size_bytes_max or self._path.stat().st_size < size_bytes_max:
                return
            rotate(self._path)
        except OSError as error:
            log.error("the log %s cannot be rotated: %s", self._path, error)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
            try:
                self._reopen()
            except OSError:
                pass  # the file that is open still takes it
            os.write(STDERR, line)
        except Exception:
            self.handleError(record)

    def _reopen(self) -> None:
        if self._path is None or is_at(self._path, STDERR):
            return
        fd = open_to_append(self._path)
        os.dup2(fd, STDERR)
        os.close(fd)


def begin(process: str, settings: Settings | None = None) -> Log:
    """Log from here on as the settings say; before they are known, as text to standard error."""
    handler = Log(settings.log_file if settings is not None and settings.log_to_file else None)
    handler.setFormatter(JsonLines(process) if settings is not None and settings.log_format == "json" else TextLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    return handler
