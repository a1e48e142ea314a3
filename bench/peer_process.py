"""A process that does one round of work for each line that it is sent.

Theory. A peer runs in an interpreter of its own, and stays over all rounds, so that starting it does not count. Its
program gets a side's name as argument, its work as JSON on the first line, and answers each further line with JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Self

from bench.load import LoadFailed
from bench.parts import Lab

WORDS_MAX = 300  # characters of why it ended
_NAMES_AN_ERROR = re.compile(r"[\w.]*(Error|Exception|Failed)\b")


class PeerProcess:
    """`program` run by `python` for `side`; what it says of errors is in a log in the lab's folder, which `log`
    tells from another of that side."""

    def __init__(
        self,
        lab: Lab,
        program: ModuleType,
        python: str,
        side: str,
        work: Any,
        env: Mapping[str, str] | None = None,
        *,
        log: str = "",
    ) -> None:
        assert program.__file__ is not None, "it is a file"
        self._command = [python, "-W", "ignore", str(Path(program.__file__).resolve()), side]
        self._side, self._work, self._env = side, work, env or {}
        self._log = lab.dir / f"{Path(program.__file__).stem}-{side}{log}.log"
        self._errors: IO[bytes]
        self._process: subprocess.Popen[str]

    def __enter__(self) -> Self:
        self._errors = self._log.open("wb")
        env = {**os.environ, **self._env}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, env=env
        )
        self._send(json.dumps(self._work))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def round(self, asked: str = "") -> dict[str, float]:
        """What it measured in one more round, of which `asked` tells what differs. `LoadFailed` with its last words if
        it ended."""
        self._send(asked)
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise LoadFailed(f"{self._side} ended with {code}: {last_words(self._log.read_text('utf-8', 'replace'))}")
        told: dict[str, float] = json.loads(line)
        return told

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        with contextlib.suppress(BrokenPipeError):  # what it says of its end is read next
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


def last_words(log: str) -> str:
    """Why a program ended: its last line that names an exception, else the end of what it said. Several processes may
    write one log, so the last line of all may be the middle of another's traceback."""
    errors = [line for line in log.splitlines() if _NAMES_AN_ERROR.match(line)]
    return errors[-1][:WORDS_MAX] if errors else log.strip()[-WORDS_MAX:]
