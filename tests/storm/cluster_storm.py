"""Storms over a cluster: clients write through any node while nodes die, stand still, are cut off, come and go.

    make storm                                  # one storm of ten rounds, as root
    make storm ARGS="--rounds 200"              # storms of twenty rounds each until there were so many
    make storm ARGS="--seed 41 --faults kill,join --buckets back"

A round: one fault strikes while clients work, and passes; the clients rest. (Some faults strike while these come to
rest: nothing that is written later covers what was lost.) Then every node has to be back, and has to show the same in
each key and each listing; and each key's history has to have an explanation (`judging.py`). Before that, all that was
written to a bucket in slices has to be in slices, and none may be missing (`slicing.py`). At the end of a storm
everything is flushed, the bucket service has to hold exactly what the nodes show, and nodes may keep no slice that
nobody names, no temporary file, and no part of an upload that ended. The seed decides which faults strike and what
clients ask; which answer comes first is the machine's.

Planted faults (`cluster_plants.py`) are found by `--plant NAME`.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from collections.abc import Sequence

from bench.box import Box
from bench.servers import ServerFailed
from tests.patience import until
from tests.storm.cluster_plants import PLANTS
from tests.storm.fleet import AT_REST, FAULTS, MODES, Fleet, last_s
from tests.storm.judging import SIZES, SLICED, Crew, abort_uploads

ROUNDS_A_STORM = 20  # in one box; then a new cluster begins
LOGGED_BYTES = 4 << 20  # of a node, in which the lines below are looked for when something is wrong
TELLING = ("conflict: ", "is taken over from", "tried again", "wanted ", "begins a new", "is active")
ANSWERS = 20  # that clients get after a fault, or before one that strikes when they rest
KEYS, CLIENTS = 4, 5


class Wrong(AssertionError):
    """What the harness found, in words."""


def storm(
    seed: int,
    rounds: int,
    *,
    faults: Sequence[str] = tuple(FAULTS),
    kinds: Sequence[str] = tuple(MODES),
    plant: str = "",
    takes_over: bool = False,
) -> str:
    """So many rounds in a box of their own; what was done. `Wrong` if something was."""
    chance = random.Random(seed)
    with Box() as box:
        fleet = Fleet(box, list(kinds), chance, plant=plant, takes_over=takes_over)
        print(f"seed {seed}: {', '.join(kinds)}; copies: {fleet.copies}", flush=True)
        sizes = SLICED if fleet.slicing.buckets else SIZES
        crew = Crew(fleet.ask, fleet.buckets, seed, KEYS, CLIENTS, changing=fleet.backed, sizes=sizes)
        left: list[str] = []
        try:
            with crew.at_work():
                for number in range(1, rounds + 1):
                    left = left or chance.sample(list(faults), len(faults))  # each before one of them comes again
                    name = left.pop()
                    print(f"seed {seed}, round {number}: {name}", flush=True)
                    _one_round(fleet, crew, name, chance)
                    _judge(fleet, crew)
                    if number == rounds:
                        fleet.flush()
                        _complain(fleet.compare_backends([*crew.places, *crew.sources]))
                        _complain(fleet.slicing.clear([*crew.places, *crew.sources]))
                        until(lambda: not fleet.left_over(), "no temporary file, and no part without an upload")
                        _judge(fleet, crew)
                    crew.go_on()
                    print(f"    {crew.board.answered} answers, {crew.board.unsure} calls without one", flush=True)
        except (AssertionError, ServerFailed) as error:
            raise Wrong(f"seed {seed}: {error}\n{_told(fleet)}") from error
        finally:
            fleet.close()
        return crew.board.told()


def _one_round(fleet: Fleet, crew: Crew, name: str, chance: random.Random) -> None:
    last_s(chance, 0.1, 0.5)
    with fleet.slicing.evicting(chance):
        if name in AT_REST:
            _get_answers(crew)
            crew.rest()
        with FAULTS[name](fleet, chance):
            last_s(chance, 0.1, 1.0)
        if name not in AT_REST:
            _get_answers(crew)
    crew.quiet()
    until(fleet.is_settled, "the cluster is settled")
    _complain(crew.board.wrong)
    abort_uploads(fleet.ask, fleet.buckets)
    _complain(fleet.slicing.settle([*crew.places, *crew.sources]))


def _get_answers(crew: Crew) -> None:
    enough = crew.board.answered + ANSWERS
    until(lambda: crew.board.wrong or crew.board.answered >= enough, "answers to clients")


def _judge(fleet: Fleet, crew: Crew) -> None:
    _complain(crew.judge(fleet.everywhere()))


def _complain(wrong: Sequence[str]) -> None:
    if wrong:
        raise Wrong("\n".join(wrong))


def _told(fleet: Fleet) -> str:
    """What the nodes say, for whoever has to find out."""
    lines = [f"on its way: {each}" for each in fleet.on_its_way()]
    lines += [f"on a disk: {each}" for each in fleet.left_over()]
    for state in fleet.states():
        assert state.cluster is not None
        nodes = ", ".join(f"{node.node_id} {node.state} ({node.doing})" for node in state.cluster.nodes)
        lines.append(f"{state.endpoint} is {state.cluster.node_id}; map {state.cluster.epoch}: {nodes}")
        lines.append(f"    {state.reads} reads, {state.flights} flights, catching up {state.catching_up}")
    for node in fleet.cluster.nodes:
        told = [line for line in node.log_tail(LOGGED_BYTES).splitlines() if any(each in line for each in TELLING)]
        lines.append("\n".join([f"--- {node.host}", *told, node.log_tail()]))
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Storms until there were `--rounds`."""
    parser = argparse.ArgumentParser(prog="make storm", description="Storms over a cluster in a box. Needs root.")
    parser.add_argument("--rounds", type=int, default=10, help="how many (default: 10)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="of the first storm")
    parser.add_argument("--faults", default=",".join(FAULTS), help="which may strike (default: %(default)s)")
    parser.add_argument("--buckets", default="", help="of back, local, coded (default: all, and back alone, in turn)")
    parser.add_argument("--takes-over", action="store_true", help="every key is served while one node is dead")
    parser.add_argument("--plant", default="", choices=["", *PLANTS], help="a fault that every node shall have")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    done, seed = 0, given.seed
    while done < given.rounds:
        rounds = min(ROUNDS_A_STORM, given.rounds - done)
        kinds = given.buckets.split(",") if given.buckets else [[*MODES], ["back"]][(seed - given.seed) % 2]
        faults = given.faults.split(",")
        try:
            print(storm(seed, rounds, faults=faults, kinds=kinds, plant=given.plant, takes_over=given.takes_over))
        except (Wrong, ServerFailed) as wrong:  # what was found, or why there can be no box
            print(wrong, file=sys.stderr)
            return 1
        done, seed = done + rounds, seed + 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
