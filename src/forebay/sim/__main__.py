"""`python -m forebay.sim --seed N`: one world, told line by line; `--seeds N`: many, a line each. docs/simulator.md."""

from __future__ import annotations

import argparse
import shlex
import sys

from forebay.ports import chance
from forebay.sim.plants import PLANTS
from forebay.sim.run import TICKS_DEFAULT, WORLDS, Outcome, simulate, world_of


def main(arguments: list[str] | None = None) -> int:
    """0: nothing found; 1: a finding, with the command that replays it."""
    parser = argparse.ArgumentParser(
        prog="python -m forebay.sim", description="Run the node's machines in simulated worlds."
    )
    parser.add_argument("--seed", type=int, help="the (first) world to run; without it, a fresh one")
    parser.add_argument("--seeds", type=int, help="run so many worlds, one line each")
    parser.add_argument(
        "--ticks", type=int, default=TICKS_DEFAULT, help="events until misfortune ends (default %(default)s)"
    )
    parser.add_argument(
        "--world", choices=WORLDS, help="only this world (default: reading for one seed, both for many)"
    )
    parser.add_argument("--plant", choices=sorted(PLANTS), help="plant this known bug, to see it found")
    asked = parser.parse_args(arguments)
    seed = asked.seed if asked.seed is not None else int(chance.token_hex(4), 16)
    try:
        if asked.seeds is None:
            world = asked.world or world_of(asked.plant)
            outcome = simulate(seed, asked.ticks, asked.plant, echo=print, world=world)
            print(f"seed {seed} events {outcome.events} fingerprint {outcome.fingerprint}")
            return _report(outcome, asked.ticks, asked.plant, world)
        worlds = [asked.world] if asked.world else [world_of(asked.plant)] if asked.plant else WORLDS
        for at in range(seed, seed + asked.seeds):
            for world in worlds:
                outcome = simulate(at, asked.ticks, asked.plant, world=world)
                done = sum(outcome.outcomes.values())
                ok = outcome.outcomes.get("ok", 0) + outcome.outcomes.get("acknowledged", 0)
                print(
                    f"seed {at:>10} {world} events {outcome.events:>6} seconds {outcome.simulated_s:>7.3f} "
                    f"done {done:>5} ok {ok:>5} {'FOUND' if outcome.finding else 'fine'} "
                    f"{outcome.fingerprint.split()[0]}",
                    flush=True,
                )
                if outcome.finding:
                    print("\n".join(outcome.tail))
                    return _report(outcome, asked.ticks, asked.plant, world)
    except BrokenPipeError:
        sys.stderr.close()
    return 0


def _report(outcome: Outcome, ticks: int, plant: str | None, world: str) -> int:
    if not outcome.finding:
        return 0
    command = ["python", "-m", "forebay.sim", "--seed", str(outcome.seed), "--ticks", str(ticks)]
    command += ["--plant", plant] if plant else []
    command += ["--world", world] if world != world_of(plant) else []
    print(f"FOUND {outcome.finding}\nreplay: {shlex.join(command)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
