"""A node, as a program: logging, limits, the supervisor. `forebay node` and `python -m forebay.node` end up here.

Theory. One function, `run`, that blocks until the node is stopped. What keeps a node from starting is an error of a
known kind with a message that says what to do; the caller shows it. The log goes to standard error, where a service
manager wants it, or to DIR/log/node.log; children inherit whichever it is.

Invariant. When `run` returns, no process of the node is left.
"""

from __future__ import annotations

import asyncio
import logging
import os

from forebay.core.errors import Unavailable
from forebay.node.process.supervisor import supervise
from forebay.node.settings import Settings, is_loopback
from forebay.node.tls import tls_files
from forebay.node.vitals import raise_file_limit

log = logging.getLogger("forebay")

FILES_MIN = 256  # below this a node cannot serve even a few clients
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run(settings: Settings) -> int:
    """Run a node until it is stopped by SIGTERM or SIGINT; the exit status.

    Prints the endpoint on standard output when it is ready. Raises `Exists` (a node runs from this directory),
    `Invalid` (settings, address or certificate) or `Unavailable` (too few file descriptors).
    """
    os.umask(0o077)  # what a node keeps is its user's alone
    files = raise_file_limit()
    if files < FILES_MIN:
        raise Unavailable(f"only {files} open files are allowed, and a node needs {FILES_MIN}: raise `ulimit -n`")
    if settings.log_to_file:
        settings.log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        log_fd = os.open(settings.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(log_fd, 2)  # ours and the children's
        os.close(log_fd)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, force=True)
    tls_files(settings)  # what is wrong with them is said here, by the process that the user looks at
    if not settings.tls_cert and not is_loopback(settings.host):
        log.warning(
            "%s can be reached from other machines and speaks no TLS: whoever is on the way reads what is sent, bearer "
            "tokens too; give --tls-cert and --tls-key",
            settings.listen,
        )
    return asyncio.run(supervise(settings, _announce))


def _announce(endpoint: str) -> None:
    try:
        print(endpoint, flush=True)
    except (ValueError, OSError):  # nobody reads it any more
        logging.getLogger("forebay").info("serving at %s", endpoint)
