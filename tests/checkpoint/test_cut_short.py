"""Saves that their own script cuts short: Ctrl-C, an exit in the middle, a fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.client.sync import Client
from forebay.core.errors import Closed, Precondition
from forebay.core.types import LOCAL_URL, Bucket
from forebay.torch import Checkpointer
from forebay.torch.checkpoint.saving import Save
from tests.checkpoint.crash_trainer import fork
from tests.checkpoint.test_ranks import ranks
from tests.node.conftest import NodeProcess
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.real
MIB = 1 << 20
SCRIPT = """
import sys, torch
from forebay.torch import Checkpointer

with Checkpointer("here/run", url=sys.argv[1], staging_bytes=8 << 20) as checkpoints:
    checkpoints.save(1, {"w": torch.ones(1000)}, wait=True)
    print("saved", flush=True)
    checkpoints.save(2, {"w": torch.ones(8_000_000)})
    print("not reached: the disk is full, and the memory too", flush=True)
"""


def test_an_interrupt_ends_a_script_whose_save_waits_for_memory_and_disk(tmp_path: Path):
    """Its threads wait for the disk for up to six hours, and nobody wants that checkpoint any more."""
    node = NodeProcess(tmp_path, "--capacity", str(16 * MIB), "--fronts", "1")
    node.start()
    try:
        with Client(node.endpoint) as client:
            client.bucket_put(Bucket("here", LOCAL_URL, write="local"))
            script = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, node.endpoint], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            assert script.stdout is not None
            assert script.stderr is not None
            assert script.stdout.readline() == "saved\n"
            assert "waits for the node" in script.stderr.readline()
            script.send_signal(signal.SIGINT)
            said, error = script.communicate(timeout=PATIENCE_S)
            assert said == ""
            assert "KeyboardInterrupt" in error
            with Checkpointer("here/run", url=node.endpoint) as checkpoints:
                assert [found.step for found in checkpoints.list()] == [1]
    finally:
        node.stop()


def test_the_other_ranks_hear_of_it(node: NodeProcess, tmp_path: Path):
    class Exits:
        def state_dict(self) -> dict[str, Any]:
            raise SystemExit("the scheduler's signal, say")

    def work(rank: int) -> None:
        with Checkpointer("runs/exits", url=node.endpoint) as checkpoints:
            if rank == 1:
                with pytest.raises(SystemExit):
                    checkpoints.save(1, {"w": Exits()})
            else:
                with pytest.raises(Closed, match="rank 1: the save of step 1 was interrupted"):
                    checkpoints.save(1, {"w": {}}).durable()
            checkpoints.save(2, {"w": torch.ones(3)}, wait=True)  # as in a notebook, whose job goes on

    ranks(tmp_path, 2, work)


def test_a_fork_that_saves_too_is_another_job(node: NodeProcess, tmp_path: Path):
    """It has the parent's numbers and tokens. What either is told is durable must be what it saved."""

    def outcome(checkpoints: Checkpointer, value: float) -> str:
        try:
            checkpoints.save(2, {"w": torch.full((2_000_000,), value)}, wait=True)
        except Precondition:
            return "told"
        return "durable"

    with Checkpointer("runs/forked", url=node.endpoint) as checkpoints:
        checkpoints.save(1, {"w": torch.zeros(2_000_000)}, wait=True)
        before = checkpoints.list()[0].token

        def child() -> None:
            (tmp_path / "said").write_text(outcome(checkpoints, 2.0))

        _, status = os.waitpid(fork(tmp_path / "child", child), 0)
        assert status == 0, (tmp_path / "child.error").read_text()
        assert (tmp_path / "said").read_text() == "durable"
        assert outcome(checkpoints, 3.0) == "told"
        found = {"w": torch.zeros(2_000_000)}
        restored = checkpoints.restore(found)
        assert restored is not None
        assert (restored.skipped, found["w"].unique().tolist()) == ([], [2.0])
        assert checkpoints.list()[0].token[:8] != before[:8]


@pytest.mark.parametrize(
    ("owner", "at"),
    [
        (Checkpointer, "_stage"),
        (Checkpointer, "_trees"),
        (Save, "start"),
        (Save, "finish"),
        (threading.Thread, "start"),
    ],
)
@pytest.mark.parametrize("wait", [False, True])
def test_an_interrupt_at_any_step_of_a_save_leaves_nobody_waiting(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch, owner: Any, at: str, wait: bool
):
    """Between copying and handing over, too: `close` waited for ever for a thread that had not begun."""
    whole, training, hits = getattr(owner, at), threading.current_thread(), iter([1])

    def interrupted(self: Any, *args: Any, **more: Any) -> Any:
        if threading.current_thread() is training and next(hits, None):
            raise KeyboardInterrupt
        return whole(self, *args, **more)

    with Checkpointer(f"runs/cut-{owner.__name__}-{at}-{wait}", url=node.endpoint) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(1000)}, wait=True)
        monkeypatch.setattr(owner, at, interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, {"w": torch.ones(1000)}, wait=wait)
        assert checkpoints.save(3, {"w": torch.ones(1000)}, wait=True).done
        assert [found.step for found in checkpoints.list()] == [3, 1]
    names = [thread.name for thread in threading.enumerate() if "copy" not in thread.name]
    assert not [name for name in names if name.startswith("checkpoint-")]
