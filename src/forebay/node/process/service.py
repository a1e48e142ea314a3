"""What a service manager is told of a node: systemd's sd_notify, datagrams of text to a socket.

Theory. systemd names a socket in NOTIFY_SOCKET to whoever it starts with `Type=notify`. The supervisor says there when
the node serves (READY), when it reads files anew (RELOADING, then READY again) and when it stops (STOPPING), and that
it lives (WATCHDOG) if it is asked to. It speaks for the whole node: children that hang it replaces itself, and they are
not given the socket. What cannot be said is not said: a manager that does not listen keeps nobody from work.

Rejected: libsystemd and its Python package (two dependencies for one `sendto`).

Invariant. READY is said only of a node that serves.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

PATIENCE_S = 1.0
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")


class ServiceManager:
    """The one that `environment` names, if any. `watchdog_s`: how often it shall hear that we live; 0 is never."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        asked = environment.get("WATCHDOG_USEC", "")
        ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(asked) / 2e6 if self._address and ours and asked.isdecimal() else 0.0

    def tell(self, *said: str) -> None:
        """Say each of `said` (`NAME=value`) in one message. Never fails; waits for at most PATIENCE_S."""
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.settimeout(PATIENCE_S)  # it may have much to read while the machine starts
            to.sendto("\n".join(said).encode(), self._address)
