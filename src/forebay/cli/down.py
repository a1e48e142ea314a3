"""`forebay down`: stop the node of a directory, gracefully, and say when it is done."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated

import typer

from forebay.cli import local_node, show
from forebay.cli.options import AsJson, Debug, Dir
from forebay.cli.outcome import Interrupted, verb
from forebay.core.errors import Busy, Denied
from forebay.ports import clock

app = typer.Typer(rich_markup_mode=None, add_completion=False)
LOOK_S = 0.05


@app.command("down")
@verb
def down(
    dir: Dir = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait until it has stopped.")
    ] = 30.0,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Stop the node that `up` started.

    Does nothing if none runs. What is cached stays. With --json: {"dir", "pid", "stopped"}.
    """
    at = local_node.directory(dir)
    there = _settled(at)
    if there is None:
        if as_json:
            show.document({"dir": str(at), "pid": None, "stopped": False})
        else:
            print(f"no node runs from {at}")
        return
    try:
        os.kill(there.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise Denied(f"the node of {at} (pid {there.pid}) belongs to another user: stop it as that user") from None
    _wait(at, there.pid, timeout_s)
    if as_json:
        show.document({"dir": str(at), "pid": there.pid, "stopped": True})
    else:
        print(f"the node of {at} has stopped; what it has cached stays")


def _settled(at: os.PathLike[str]) -> local_node.Running | None:
    """The running node, once it is seen who it is."""
    path = local_node.directory(os.fspath(at))
    give_up_s = clock.monotonic_s() + 10
    while True:
        there = local_node.running(path)
        if there is None or there.pid:
            return there
        if clock.monotonic_s() > give_up_s:
            raise Busy(
                f"a process that this user may not see holds {path / 'node.lock'}: stop it as the user who started it"
            )
        time.sleep(LOOK_S)


def _wait(at: os.PathLike[str], pid: int, timeout_s: float) -> None:
    path = local_node.directory(os.fspath(at))
    give_up_s = clock.monotonic_s() + timeout_s
    try:
        while local_node.alive(pid) or (local_node.is_locked(path) and local_node.said(path).pid in (0, pid)):
            if clock.monotonic_s() > give_up_s:
                raise Busy(
                    f"the node (pid {pid}) is still stopping after {timeout_s:g} s: it finishes what clients are "
                    f"reading; wait with `forebay down --timeout 300`, or end it at once with `kill -9 {pid}`, "
                    "which loses nothing that is clean"
                )
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped waiting; the node (pid {pid}) goes on stopping") from None
