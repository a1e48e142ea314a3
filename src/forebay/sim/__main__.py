"""`python -m forebay.sim --seed N`: one story, told line by line; `--seeds N`: many, a line each. docs/simulator.md."""

from __future__ import annotations

import argparse
import gc
import itertools
import shlex
import sys
import time
from collections.abc import Iterable

from forebay.ports import chance
from forebay.sim.scale import scale

CALLS_DEFAULT = 120


def main(arguments: list[str] | None = None) -> int:
    """0: nothing found; 1: a finding, with the command that replays it."""
    parser = argparse.ArgumentParser(
        prog="python -m forebay.sim", description="Run a node in simulated worlds, and judge what it answered."
    )
    parser.add_argument("--seed", type=int, help="the (first) story to run; without it, a fresh one")
    parser.add_argument("--seeds", type=int, help="run so many stories, one line each")
    parser.add_argument("--calls", type=int, help=f"of clients (default {CALLS_DEFAULT}; with --nodes 50 a round)")
    parser.add_argument("--plant", help="plant this known bug, to see it found")
    parser.add_argument("--nodes", action="store_true", help="stories of several nodes that share their keys")
    parser.add_argument("--cluster", action="store_true", help="worlds of the machines alone by which nodes agree")
    parser.add_argument(
        "--copies",
        action="store_true",
        help="such a world whose nodes keep copies for each other; with --nodes: only stories with two copies",
    )
    parser.add_argument("--coverage", action="store_true", help="say how much of the node's code was entered")
    asked = parser.parse_args(arguments)
    asked.seed = asked.seed if asked.seed is not None else int(chance.token_hex(4), 16)
    try:
        if asked.cluster or (asked.copies and not asked.nodes):
            return _tell_clusters(asked)
        scale()
        return _tell_stories(asked)
    except BrokenPipeError:
        sys.stderr.close()
    return 0


def _tell_clusters(asked: argparse.Namespace) -> int:
    from forebay.sim import cluster, cluster_plants, copies, copies_plants, plants

    flag = "--copies" if asked.copies else "--cluster"
    known = copies_plants.PLANTS if asked.copies else cluster_plants.PLANTS
    if asked.plant not in (None, *known):
        print(f"--plant: choose from {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    count = asked.seeds or 1
    for seed in range(asked.seed, asked.seed + count):
        echo = print if asked.seeds is None else None
        world = copies.Copies(seed, echo) if asked.copies else cluster.Cluster(seed, echo)
        finding = ""
        try:
            with plants.planted(asked.plant, known):
                world.run()
        except Exception as error:
            finding = f"{type(error).__name__}: {error}"
        print(
            f"seed {seed:>10} acts {world.acknowledged:>5} {world.digest} {'FOUND' if finding else 'fine'}", flush=True
        )
        if finding:
            print("\n".join(world.lines[-cluster.TAIL_LINES :]) if asked.seeds is not None else "")
            planted = f" --plant {asked.plant}" if asked.plant else ""
            print(f"FOUND {finding}\nreplay: python -m forebay.sim {flag} --seed {seed}{planted}")
            return 1
    if asked.seeds is not None:
        print(f"{count * cluster.WORLD_S / 3600:.1f} hours of clusters")
    return 0


def _tell_stories(asked: argparse.Namespace) -> int:
    from forebay.sim import coverage, plants
    from forebay.sim.story import TAIL_LINES, Story

    kind: type[Story] | type[Nodes]
    if asked.nodes:
        try:
            from forebay.sim.home_plants import PLANTS
            from forebay.sim.nodes import CALLS, Nodes, copies_of
        except ModuleNotFoundError as error:
            print(f"--nodes needs {error.name}: pip install '.[sim]'", file=sys.stderr)
            return 2

        kind, known, calls = Nodes, PLANTS, asked.calls or CALLS
    else:
        kind, known, calls = Story, plants.PLANTS, asked.calls or CALLS_DEFAULT
    if asked.plant not in (None, *known):
        print(f"--plant: choose from {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    gc.freeze()  # what was imported stays: a world that is given up is collected quickly
    seeds: Iterable[int] = itertools.count(asked.seed)
    if asked.nodes and asked.copies:
        seeds = filter(lambda seed: copies_of(seed) > 1, seeds)
    count, began_s, told_s = asked.seeds or 1, time.process_time(), 0.0
    entered = coverage.Entered() if asked.coverage else None
    for seed in itertools.islice(seeds, count):
        story = kind(seed, calls, echo=print if asked.seeds is None else None)
        finding = ""
        try:
            with plants.planted(asked.plant, known):
                story.run()
        except Exception as error:
            finding = f"{type(error).__name__}: {error}"
        told_s += story.clock.now_s
        told = f"seed {seed:>10} lives {story.lives:>3} answers {story.board.answered:>4} {story.digest}"
        print(f"{told} {'FOUND' if finding else 'fine'}", flush=True)
        if finding:
            print("\n".join(story.lines[-TAIL_LINES:]) if asked.seeds is not None else "")
            command = ["python", "-m", "forebay.sim", *(["--nodes"] if asked.nodes else []), "--seed", str(seed)]
            command += ["--calls", str(calls)]
            command += ["--plant", asked.plant] if asked.plant else []
            print(f"FOUND {finding}\nreplay: {shlex.join(command)}")
            return 1
    if asked.seeds is not None:
        rate = f"{count / (time.process_time() - began_s) * 60:.0f} seeds a minute of one core"
        print(f"{rate}, {told_s / 3600:.1f} hours of {'clusters' if asked.nodes else 'nodes'}")
    if entered is not None:
        print(entered.told())
    return 0


if __name__ == "__main__":
    sys.exit(main())
