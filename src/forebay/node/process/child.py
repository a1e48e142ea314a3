"""How a process of the node is started, and how it ends with the supervisor that started it.

Theory. The supervisor starts `python -m forebay.node.process.engine` and `python -m forebay.node.process.front NUMBER`
as fresh interpreters (a fork would carry obstore's threads into a child that hangs). Standard input comes from the
supervisor: its first line is the settings as JSON. Exit status 0 means "told to stop"; EXIT_REFUSED means that starting
again cannot help.

A child must not outlive its supervisor: an orphan would hold the port and the volumes against the next one, and its
clients would take it for a node. So the kernel kills it with the supervisor's main thread, the one that starts
children (PR_SET_PDEATHSIG, SIGKILL: it reaches one that is stopped or hangs, too). Standard input ends then as well,
which covers a supervisor that was gone before the kernel was asked, and a kernel that refuses. Nothing is flushed or
finished: a kill is what every process of a node must survive anyhow.

Standard input is a socket, and a child that serves beats on it (`core/machines/pulse.py`), so that its supervisor
notices one that hangs. What the supervisor has to say later comes the other way, a line each. Before it is killed for
that, the child itself logs where its loop stands: a thread does that, which runs while the loop waits in the kernel,
where no signal reaches it. (Rejected: faulthandler's own timer. It reads the stacks of threads that run, without
Python's lock, and may end a process that was only slow.)

SIGHUP has a child reopen its log and read files anew. One that just starts could not take it yet, and would end: so it
is started with the signal held back, until `on_hangup` says what to do.

From before its first look at the node's data until its last instruction a child shares a lock on `run/children.lock`,
so the next supervisor knows when the last of them is gone (`supervisor.last_run_ended`).

Rejected: stopping in good order when standard input ends (seconds in which the next node cannot start, and a stopped
process never reads); polling getppid (late, and wrong under a subreaper).

Invariant. A child that looks at the node's data holds the lock, and its supervisor lived when it had taken it.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from forebay.core.errors import Closed
from forebay.core.machines.pulse import Pulse, interval_s
from forebay.node.settings import Settings, from_json
from forebay.ports import clock, machine

log = logging.getLogger("forebay.process")

EXIT_REFUSED = 78  # sysexits.h EX_CONFIG: the settings or the machine must change first
SHOWN_AFTER = 0.75  # of its deadline, a process that does not beat shows where it stands
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def begin(fd: int = 0) -> Settings:
    """The settings that the supervisor sends. From here on this process ends with it. `Closed` if it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    settings = receive(fd)
    lock = os.open(settings.children_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # until the process ends
    fcntl.flock(lock, fcntl.LOCK_SH)
    if _ended(fd):
        raise Closed("the supervisor has ended: start the node again with `forebay node`")
    return settings


def receive(fd: int = 0) -> Settings:
    """The settings on the first line of standard input. Blocks until they are there."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(fd, 1)  # one at a time: what follows the line is not ours to swallow
        if not part:
            raise Closed("no settings came on standard input: this program is started by `forebay node`")
        line += part
    return from_json(bytes(line))


def follow_parent(loop: asyncio.AbstractEventLoop, told: Callable[[bytes], None], fd: int = 0) -> None:
    """Call `told` with each line that the supervisor sends, and die as soon as it has ended, should the kernel not have
    seen to that."""
    kept = bytearray()

    def readable() -> None:
        try:
            data = os.read(fd, 4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            os.kill(os.getpid(), signal.SIGKILL)
        kept.extend(data)
        while b"\n" in kept:
            line, _, rest = bytes(kept).partition(b"\n")
            kept[:] = rest
            told(line)

    os.set_blocking(fd, False)
    loop.add_reader(fd, readable)


def beat(loop: asyncio.AbstractEventLoop, deadline_s: float, fd: int = 0) -> None:
    """From now on tell the supervisor, again and again, that `loop` turns. Call it in the loop's thread. If the loop
    does not turn for most of `deadline_s` (0: however long), where it stands is logged."""
    beats = 0

    def tell() -> None:
        nonlocal beats
        beats += 1
        with suppress(OSError):  # it does not read: it is busy, or stopped, or gone
            os.write(fd, b".")
        loop.call_later(interval_s(deadline_s), tell)

    tell()
    if deadline_s:
        watched = (threading.get_ident(), Pulse(SHOWN_AFTER * deadline_s), lambda: beats)
        threading.Thread(target=_watch, args=watched, name="forebay-pulse", daemon=True).start()


def _watch(thread: int, pulse: Pulse, beats: Callable[[], int]) -> None:
    """Log, once, where `thread` stands when it hangs by the supervisor's own rule."""
    hangs = False
    while True:
        time.sleep(interval_s(pulse.deadline_s))
        before, hangs = hangs, pulse.look(clock.monotonic_s(), beats(), machine.active_s(os.getpid()))
        if hangs and not before:
            stack = "".join(traceback.format_stack(sys._current_frames().get(thread))).rstrip()
            text = "the loop has stood still for %g s, here:"
            log.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, text, (pulse.silent_s,), None, sinfo=stack))


def stop_node() -> None:
    """Have the supervisor stop the node, as an operator would."""
    os.kill(os.getppid(), signal.SIGTERM)  # it lives: this process would have ended with it


def on_hangup(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    """Call `act` at each SIGHUP, also for one that came before now."""
    loop.add_signal_handler(signal.SIGHUP, act)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP, signal.SIGINT])


def _ended(fd: int) -> bool:
    """Whether nobody holds the other end of standard input any more."""
    poll = select.poll()
    poll.register(fd, 0)  # what is wrong with it is told unasked
    return bool(poll.poll(0))
