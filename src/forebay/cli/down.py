"""`forebay down`: stop the node of a directory, gracefully, and say when it is done."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from forebay.cli import show
from forebay.cli.options import AsJson, Debug, Dir
from forebay.cli.outcome import Interrupted, verb
from forebay.client import local_node
from forebay.core.errors import Busy, Denied
from forebay.ports import clock, machine

app = typer.Typer(rich_markup_mode=None, add_completion=False)
LOOK_S = 0.05


@app.command("down")
@verb
def down(
    dir: Dir = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait until it has stopped.")
    ] = 150.0,
    flush: Annotated[
        bool, typer.Option("--flush/--no-flush", help="First bring to the backends what only the node has, or do not.")
    ] = True,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Stop the node that `up` started.

    Does nothing if none runs. What is cached stays, and so does what could not be flushed: the next start goes on with
    it. With --json: {"dir", "pid", "stopped", "owed_objects", "owed_bytes"}.
    """
    at = local_node.directory(dir)
    there = _settled(at)
    if there is None:
        if as_json:
            show.document(_document(at, None))
        else:
            print(f"no node runs from {at}")
        return
    try:
        if not flush:
            (at / "run" / "no-flush").touch()
        os.kill(there.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise Denied(f"the node of {at} (pid {there.pid}) belongs to another user: stop it as that user") from None
    _wait(at, there.pid, timeout_s)
    if as_json:
        show.document(_document(at, there.pid))
    else:
        print(f"the node of {at} has stopped; what it has cached stays")
        objects, size_bytes = _owed(at)
        if objects:
            print(
                f"not yet in the backends: {show.counted(objects, 'object')} or deletes ({show.size(size_bytes)}), "
                "safe in the directory, and the next `forebay up` goes on with them"
            )


def _document(at: Path, pid: int | None) -> dict[str, object]:
    objects, size_bytes = _owed(at)
    return {
        "dir": str(at),
        "pid": pid,
        "stopped": pid is not None,
        "owed_objects": objects,
        "owed_bytes": size_bytes,
    }


def _owed(at: Path) -> tuple[int, int]:
    """What the last stop left unflushed: objects and bytes."""
    try:
        found = json.loads((at / "run" / "owed.json").read_text("utf-8"))
        return int(found["objects"]), int(found["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0


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
        while machine.alive(pid) or (local_node.is_locked(path) and local_node.said(path).pid in (0, pid)):
            if clock.monotonic_s() > give_up_s:
                raise Busy(
                    f"the node (pid {pid}) is still stopping after {timeout_s:g} s: it finishes what clients are "
                    "reading and flushes what is dirty; wait with `forebay down --timeout 300`, leave the flush for "
                    f"the next start with `forebay down --no-flush`, or end it at once with `kill -9 {pid}`"
                )
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped waiting; the node (pid {pid}) goes on stopping") from None
