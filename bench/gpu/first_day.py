"""What to look at on the first day with a GPU, in this order: each check trusts those before it.

`python -m bench.gpu.offload --first-day`. The checks ran one by one on an H200 (2026-11-27). All passed but that of the
predicted time, at two budgets of four: docs/offload.md has what was seen. Without a device it says so, and that is no
success. A check that fails ends the day: what comes after it would say nothing.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.offload import (
    PLANNED_SHARE,
    QUICK,
    SHARES,
    STEPS,
    Round,
    Told,
    Work,
    asked,
    difference,
    measured,
    no_device,
    steady,
)
from bench.row import MIB

ERROR_MAX = 0.10  # of a predicted step
MOVED_BYTES = 1024 * MIB  # in the checks of memory and of copies
LARGER = {**QUICK, "batch": 2, "sequence": 256}  # of which weights are the most
COPY_SHARE_MAX = 0.5  # of a copy's time, for who asked for it: more is no copy behind the computing
DEVICE_TESTS = tuple(
    f"tests/torch/offload/test_{what}.py" for what in ("device_memory", "gpudirect", "profile", "on_a_device")
)


class Failed(Exception):
    """What a check found that must not be."""


class Check(NamedTuple):
    name: str
    run: Callable[[], str]  # what was found; `Failed`, or whatever else went wrong


def checks(folder: Path, ask: Callable[[Work], Told] = asked, device: str = "cuda") -> Iterator[Check]:
    """In their order. `ask` does the work of one process (`offload`)."""
    base: Work = {"device": device, "shape": dict(QUICK)}
    found: list[Round] = []

    def bits() -> str:
        found.append(measured(folder, SHARES, base, ask, sides=("ours",)))
        return same_bits(found[0])

    yield Check("the tests that need a device", device_tests)
    yield Check("the same bits at 90 to 60 % of the memory", bits)
    yield Check("an emptied storage gives its memory back", lambda: gives_back(device))
    yield Check("copies run behind the computing", lambda: is_asynchronous(device))
    yield Check("a step takes what was predicted", lambda: as_predicted(found[0]))
    yield Check("no memory in the middle of a plan", lambda: out_of_memory(folder, base, found[0], ask))
    yield Check("a state that is larger than the device", lambda: larger_state(folder, {**base, "shape": LARGER}, ask))
    yield Check("GPUDirect Storage", lambda: straight(folder))


def device_tests() -> str:
    """Those that are skipped elsewhere."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *DEVICE_TESTS], capture_output=True, text=True, check=False
    )
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
    if done.returncode:
        raise Failed(last)
    return last


def same_bits(found: Round) -> str:
    """Losses of the engine at each limit are those without one."""
    if found.plain["error"]:
        raise Failed(f"without a limit it did not train: {found.plain['error']}")
    if off := difference(found.again, found.plain):
        raise Failed(f"two runs without a limit have losses that are off by {off:.3g}: nothing can be compared")
    for share, sides in found.limited.items():
        told = sides["ours"]
        if told["error"]:
            raise Failed(f"at {share:.0%}: {told['error']}")
        if off := difference(told, found.plain):
            raise Failed(f"at {share:.0%} losses are off by {off:.3g}")
    return f"losses bit-equal at {', '.join(f'{share:.0%}' for share in found.limited)}"


def gives_back(device: str) -> str:
    """`resize_(0)`, as the engine empties what left, lowers what torch counts as allocated."""
    import torch

    tensor = torch.empty(MOVED_BYTES, dtype=torch.uint8, device=device)
    before = torch.cuda.memory_allocated()
    tensor.untyped_storage().resize_(0)
    gone = before - torch.cuda.memory_allocated()
    if gone < MOVED_BYTES:
        raise Failed(f"of {MOVED_BYTES} bytes {gone} came back")
    return f"{gone / MIB:,.0f} MiB came back"


def is_asynchronous(device: str) -> str:
    """Whoever gives a tensor to a tier has it taken while it goes on."""
    import torch

    from forebay.offload.tiers.host_tier import HostTier

    tensor = torch.ones(MOVED_BYTES, dtype=torch.uint8, device=device)
    with HostTier(2 * MOVED_BYTES) as tier:
        for _ in range(2):  # the first pins memory
            slot = tier.reserve(MOVED_BYTES)
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            ticket = tier.store(slot, tensor)
            asked_s = time.perf_counter() - began_s
            ticket.wait()
            copied_s = time.perf_counter() - began_s
            tier.release(slot)
    said = f"asking took {asked_s * 1e3:.2f} ms of the copy's {copied_s * 1e3:.0f} ms"
    if asked_s > COPY_SHARE_MAX * copied_s:
        raise Failed(said)
    return f"{said}, {MOVED_BYTES / copied_s / 1e9:.1f} GB/s"


def as_predicted(found: Round) -> str:
    """Predicted steps beside those that were timed from an idle device to an idle device."""
    import statistics

    errors = {}
    for share, sides in found.limited.items():
        step_s = statistics.median(steady(sides["ours"]))
        errors[share] = abs(sides["ours"]["report"]["predicted_s"] / step_s - 1)
    said = ", ".join(f"{error:.1%} off at {share:.0%}" for share, error in errors.items())
    if max(errors.values()) > ERROR_MAX:
        raise Failed(said)
    return said


def out_of_memory(folder: Path, base: Work, found: Round, ask: Callable[[Work], Told]) -> str:
    """A device that has less than the plan was told: it must say so, or go on with the same losses."""
    peak = int(found.plain["peak_bytes"])
    told = ask(_work(folder, base, limit_bytes=int(0.7 * peak), budget_bytes=int(0.8 * peak), room_bytes=peak))
    if told["error"] and not told["oom"]:
        raise Failed(f"not as out of memory: {told['error']}")
    if off := difference(told, found.plain):
        raise Failed(f"losses are off by {off:.3g}")
    return f"it {'ended as out of memory' if told['oom'] else 'went on'} after {len(told['losses'])} steps"


def larger_state(folder: Path, base: Work, ask: Callable[[Work], Told]) -> str:
    """Weights and moments take more than the device has."""
    shape = base["shape"]
    weights = shape["layers"] * 12 * shape["width"] ** 2 + 2 * shape["words"] * shape["width"]
    limit = int(0.8 * 12 * weights)  # a weight and two moments, of four bytes each
    plain = ask({**base, "side": "none", "steps": STEPS["none"]})
    work = _work(folder, base, limit_bytes=limit, budget_bytes=int(PLANNED_SHARE * limit), room_bytes=16 * weights)
    told = ask({**work, "close_to": "cpu"})
    if error := plain["error"] or told["error"]:
        raise Failed(error)
    if off := difference(told, plain):
        raise Failed(f"losses are off by {off:.3g}")
    return f"{12 * weights / MIB:,.0f} MiB of state in {limit / MIB:,.0f} MiB, losses bit-equal"


def straight(folder: Path) -> str:
    """Bytes by GPUDirect and back, with the sums that the device makes of them."""
    import torch

    from forebay.offload.tiers.disk_tier import DiskTier

    with DiskTier([str(folder)], 4 * MOVED_BYTES, experimental=True) as tier:
        usable, why = tier.gpudirect()
        if not usable:
            return f"not looked at: {why}"
        source = torch.randint(0, 256, (MOVED_BYTES,), dtype=torch.uint8, device="cuda")
        into = torch.zeros_like(source)
        slot = tier.reserve(MOVED_BYTES)
        tier.store(slot, source).wait()
        tier.load(slot, into).wait()
        if not torch.equal(source, into):
            raise Failed("other bytes came back")
        return tier.path


def _work(folder: Path, base: Work, *, limit_bytes: int, budget_bytes: int, room_bytes: int) -> Work:
    rooms = {"host_bytes": room_bytes, "disk_bytes": room_bytes, "folder": str(folder)}
    work = {**base, "side": "ours", "steps": STEPS["ours"], "limit_bytes": limit_bytes, "budget_bytes": budget_bytes}
    return work | rooms


def first_day(folder: Path, of: Callable[[Path], Iterator[Check]] = checks) -> int:
    """Print what each check found, up to the first that failed; 0 if none did."""
    if reason := no_device():
        print(f"first day: {reason}. It needs a CUDA device and a checkout with its tests.")
        return 1
    for number, check in enumerate(of(folder), 1):
        try:
            said: Any = check.run()
        except Exception as error:  # whatever it is, it ends the day
            what = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
            print(f"{number}. {check.name}: FAILED: {what}\nThe checks after it were not made.")
            return 1
        print(f"{number}. {check.name}: {said}", flush=True)
    return 0
