"""How a process of the node is started, and how it learns that its parent is gone.

Theory. The supervisor starts `python -m forebay.node.engine` and `python -m forebay.node.front NUMBER` as fresh
interpreters (a fork would carry obstore's threads into a child that hangs). Standard input is a pipe: its first line
is the settings as JSON, and its end means that the supervisor ended, however it ended. A child then stops as if it had
been sent SIGTERM. Exit status 0 means "told to stop"; EXIT_REFUSED means that starting again cannot help.

Rejected: prctl(PR_SET_PDEATHSIG) (fires when the *thread* that forked ends); polling getppid (late, and wrong under a
subreaper).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from forebay.core.errors import Closed
from forebay.node.settings import Settings, from_json

EXIT_REFUSED = 78  # sysexits.h EX_CONFIG: the settings or the machine must change first


def receive(fd: int = 0) -> Settings:
    """The settings on the first line of standard input. Blocks until they are there."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(fd, 1)  # one at a time: what follows the line is not ours to swallow
        if not part:
            raise Closed("no settings came on standard input: this program is started by `forebay node`")
        line += part
    return from_json(bytes(line))


def watch_parent(loop: asyncio.AbstractEventLoop, on_gone: Callable[[], None], fd: int = 0) -> None:
    """Call `on_gone` once when the supervisor has ended."""

    def readable() -> None:
        try:
            data = os.read(fd, 4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            loop.remove_reader(fd)
            on_gone()

    os.set_blocking(fd, False)
    loop.add_reader(fd, readable)
