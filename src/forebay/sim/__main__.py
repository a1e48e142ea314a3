"""`python -m forebay.sim --seed N`: one story, told line by line; `--seeds N`: many, a line each. docs/simulator.md."""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time

from forebay.ports import chance
from forebay.sim.plants import PLANTS
from forebay.sim.run import TICKS_DEFAULT, WORLDS, Outcome, simulate, world_of
from forebay.sim.scale import scale

NODE = "node"
CALLS_DEFAULT = 120


def main(arguments: list[str] | None = None) -> int:
    """0: nothing found; 1: a finding, with the command that replays it."""
    parser = argparse.ArgumentParser(
        prog="python -m forebay.sim", description="Run a node, or the machines in it, in simulated worlds."
    )
    parser.add_argument("--seed", type=int, help="the (first) world to run; without it, a fresh one")
    parser.add_argument("--seeds", type=int, help="run so many worlds, one line each")
    parser.add_argument("--world", choices=(NODE, *WORLDS, "machines"), default=NODE, help="default: %(default)s")
    parser.add_argument("--calls", type=int, default=CALLS_DEFAULT, help="of clients to a node (default %(default)s)")
    parser.add_argument(
        "--ticks", type=int, default=TICKS_DEFAULT, help="of machines: events until misfortune ends (%(default)s)"
    )
    parser.add_argument("--plant", help="plant this known bug, to see it found")
    parser.add_argument("--coverage", action="store_true", help="say how much of the node's code was entered")
    asked = parser.parse_args(arguments)
    asked.seed = asked.seed if asked.seed is not None else int(chance.token_hex(4), 16)
    try:
        if asked.world == NODE:
            scale()
            return _tell_stories(asked)
        if asked.plant not in (None, *PLANTS):
            parser.error(f"--plant: choose from {', '.join(sorted(PLANTS))}")
        return _run_machines(asked)
    except BrokenPipeError:
        sys.stderr.close()
    return 0


def _tell_stories(asked: argparse.Namespace) -> int:
    """Stories of a real node."""
    from forebay.sim import bugs, coverage
    from forebay.sim.story import TAIL_LINES, Story

    if asked.plant not in (None, *bugs.BUGS):
        print(f"--plant: choose from {', '.join(sorted(bugs.BUGS))}", file=sys.stderr)
        return 2
    gc.freeze()  # what was imported stays: a world that is given up is collected quickly
    count, began_s = asked.seeds or 1, time.process_time()
    entered = coverage.Entered() if asked.coverage else None
    for seed in range(asked.seed, asked.seed + count):
        story = Story(seed, asked.calls, echo=print if asked.seeds is None else None)
        finding = ""
        try:
            with bugs.planted(asked.plant):
                story.run()
        except Exception as error:
            finding = f"{type(error).__name__}: {error}"
        told = f"seed {seed:>10} lives {story.lives:>3} answers {story.board.answered:>4} {story.digest}"
        print(f"{told} {'FOUND' if finding else 'fine'}", flush=True)
        if finding:
            print("\n".join(story.lines[-TAIL_LINES:]) if asked.seeds is not None else "")
            command = ["python", "-m", "forebay.sim", "--seed", str(seed), "--calls", str(asked.calls)]
            command += ["--plant", asked.plant] if asked.plant else []
            print(f"FOUND {finding}\nreplay: {shlex.join(command)}")
            return 1
    if asked.seeds is not None:
        print(f"{count / (time.process_time() - began_s) * 60:.0f} seeds a minute of one core")
    if entered is not None:
        print(entered.told())
    return 0


def _run_machines(asked: argparse.Namespace) -> int:
    """The machines of core/ alone, on a shell of the simulator's."""
    worlds = WORLDS if asked.world == "machines" else [asked.world]
    for at in range(asked.seed, asked.seed + (asked.seeds or 1)):
        for world in [world_of(asked.plant)] if asked.plant else worlds:
            echo = print if asked.seeds is None else None
            outcome = simulate(at, asked.ticks, asked.plant, echo=echo, world=world)
            done = sum(outcome.outcomes.values())
            ok = outcome.outcomes.get("ok", 0) + outcome.outcomes.get("acknowledged", 0)
            if echo is not None:
                print(f"seed {at} events {outcome.events} fingerprint {outcome.fingerprint}")
            else:
                print(
                    f"seed {at:>10} {world} events {outcome.events:>6} seconds {outcome.simulated_s:>7.3f} "
                    f"done {done:>5} ok {ok:>5} {'FOUND' if outcome.finding else 'fine'} "
                    f"{outcome.fingerprint.split()[0]}",
                    flush=True,
                )
            if outcome.finding:
                if echo is None:
                    print("\n".join(outcome.tail))
                return _report(outcome, asked.ticks, asked.plant, world)
    return 0


def _report(outcome: Outcome, ticks: int, plant: str | None, world: str) -> int:
    command = ["python", "-m", "forebay.sim", "--seed", str(outcome.seed), "--ticks", str(ticks), "--world", world]
    command += ["--plant", plant] if plant else []
    print(f"FOUND {outcome.finding}\nreplay: {shlex.join(command)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
