"""A node, as a program: logging, limits, the supervisor. `forebay node` and `python -m forebay.node` end up here.

Theory. One function, `run`, that blocks until the node is stopped. What keeps a node from starting is an error of a
known kind with a message that says what to do; the caller shows it.

Invariant. When `run` returns, no process of the node is left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal

from forebay.core.errors import Invalid, Unavailable
from forebay.node.peer_key import read_secret
from forebay.node.process import logs
from forebay.node.process.supervisor import supervise
from forebay.node.rotated_files import open_to_append
from forebay.node.settings import Settings, is_loopback
from forebay.node.tls import tls_files
from forebay.node.vitals import raise_file_limit

log = logging.getLogger("forebay")

FILES_MIN = 256  # below this a node cannot serve even a few clients


def run(settings: Settings) -> int:
    """Run a node until it is stopped by SIGTERM or SIGINT; the exit status.

    Prints the endpoint on standard output when it is ready. Raises `Exists` (a node runs from this directory),
    `Invalid` (settings, address or certificate) or `Unavailable` (too few file descriptors).
    """
    os.umask(0o077)  # what a node keeps is its user's alone
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to read anew
    files = raise_file_limit()
    if files < FILES_MIN:
        raise Unavailable(f"only {files} open files are allowed, and a node needs {FILES_MIN}: raise `ulimit -n`")
    try:
        node_log = logs.begin("supervisor", settings)
        if settings.audit != "off":  # later a front goes on without it
            os.close(open_to_append(settings.audit_file(0)))
    except OSError as error:
        where = settings.log_file.parent
        raise Invalid(f"no log can be written in {where} ({error.strerror}): give another --dir") from None
    settings.access.check()
    if settings.peer_key:
        read_secret(settings.peer_key)
    tls_files(settings)  # what is wrong with them is said here, by the process that the user looks at
    if not settings.tls_cert and not is_loopback(settings.host):
        log.warning(
            "%s can be reached from other machines and speaks no TLS: whoever is on the way reads what is sent, bearer "
            "tokens too; give --tls-cert and --tls-key",
            settings.listen,
        )
    return asyncio.run(supervise(settings, _announce, node_log))


def _announce(endpoint: str) -> None:
    try:
        print(endpoint, flush=True)
    except (ValueError, OSError):  # nobody reads it any more
        logging.getLogger("forebay").info("serving at %s", endpoint)
