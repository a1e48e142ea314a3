"""Storms: real nodes, faults at random moments, clients on the same keys; every answer has to have an explanation.

`FOREBAY_STORM_ROUNDS=500 pytest tests/storm/test_storm.py` runs five hundred rounds; in the suite they are few.
`FOREBAY_STORM_SEED` repeats one, as far as chance in the machine allows; `FOREBAY_STORM_FAULTS=kill,lost` names what
may strike (default: all that can). A round: up to three faults strike while clients work, and pass
in any order; the clients rest; each key's history is judged, listings are compared with reads; now and then everything
is flushed, and the bucket service has to hold exactly what the node shows.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from bench import servers
from tests.node.conftest import alive
from tests.patience import until
from tests.storm.judging import Crew, abort_uploads
from tests.storm.weather import DISTURBING, FAULTS, FRONTS, Sea, pause_s

ROUNDS = int(os.environ.get("FOREBAY_STORM_ROUNDS", "5"))
SEED = int(os.environ.get("FOREBAY_STORM_SEED", str(random.randrange(1 << 30))))
NAMED = os.environ.get("FOREBAY_STORM_FAULTS", "")
ANSWERS = 12  # that clients get while a fault lasts, where they can get any
FLUSH_EVERY = 5
LOG_CHARS = 20_000  # of the node's log that a failure shows


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(60 * ROUNDS + 600)
def test_every_answer_in_a_storm_has_an_explanation(seaweed: servers.SeaweedFS, tmp_path: Path) -> None:
    print(f"FOREBAY_STORM_SEED={SEED}")
    chance = random.Random(SEED)
    with Sea(tmp_path, f"storm-{SEED}", seaweed) as sea, log_shown(sea):
        faults = NAMED.split(",") if NAMED else list(FAULTS)
        for name, why in sea.cannot.items():
            print(f"no {name}: {why}")
        faults = [name for name in faults if name not in sea.cannot]
        crew = Crew(sea.ask, sea.buckets, SEED, changing=sea.backed[1:])
        before = open_files(sea)
        with crew.at_work():
            for number in range(1, ROUNDS + 1):
                names = chance.sample(faults, min(len(faults), chance.choice([1, 1, 1, 2, 2, 3])))
                print(f"round {number}: {', '.join(names)}", flush=True)
                one_round(sea, crew, names, chance)
                until(sea.is_settled, "the node is settled")
                crew.quiet()
                until(sea.is_settled, "the node is settled")
                if number % FLUSH_EVERY == 0 or number == ROUNDS:
                    sea.flush()
                abort_uploads(sea.ask, sea.buckets)
                # The first answer of a bucket service that was away ends every doubt; reads must show the same then.
                listed = {bucket: sea.listed(bucket) for bucket in sea.buckets}
                judged(crew, number, names)
                compare_listings(sea, crew, listed)
                if number % FLUSH_EVERY == 0 or number == ROUNDS:
                    compare_backends(sea, crew)
                crew.go_on()
                print(f"    {crew.board.answered} answers, {crew.board.unsure} calls without one", flush=True)
        print(crew.board.told())
        nothing_is_left_over(sea, before)


@contextlib.contextmanager
def log_shown(sea: Sea) -> Iterator[None]:
    """What the node logged last is shown with a failure."""
    try:
        yield
    except BaseException:
        print(sea.node.log[-LOG_CHARS:])
        raise


def one_round(sea: Sea, crew: Crew, names: list[str], chance: random.Random) -> None:
    crew.board.may_be_full = "full" in names
    sea.is_disturbed = bool(DISTURBING & set(names))
    # A frozen disk can be neither filled nor emptied: it freezes last, and is full for longer.
    lasting = {name: contextlib.ExitStack() for name in sorted(names, key=lambda name: name == "frozen")}
    with contextlib.ExitStack() as all_of_them:
        for name, each in lasting.items():
            pause_s(chance, 0.0, 0.5)
            all_of_them.enter_context(each)
            each.enter_context(FAULTS[name](sea, chance))
        pause_s(chance, 0.1, 1.0)
        ending = chance.sample(list(lasting), len(lasting))
        for name in sorted(ending, key=lambda name: name == "full" and "frozen" in lasting):
            lasting[name].close()
    answered = crew.board.answered
    try:
        until(lambda: crew.board.wrong or crew.board.answered >= answered + ANSWERS, "answers after the faults")
    except AssertionError:
        faulthandler.dump_traceback(sys.__stderr__)
        raise


def judged(crew: Crew, number: int, names: list[str]) -> None:
    wrong = crew.judge()
    assert not wrong, f"round {number} ({', '.join(names)}), seed {SEED}:\n" + "\n".join(wrong)


def compare_listings(sea: Sea, crew: Crew, listed: dict[str, dict[str, str]]) -> None:
    """A listing showed each key that can be read, and no other, with the ETag that a read tells."""
    for bucket in sea.buckets:
        shown = {}
        for place in [*crew.places, *crew.sources]:
            if place[0] != bucket:
                continue
            answer = sea.ask("HEAD", f"/{bucket}/{quote(place[1])}", {}, None)
            assert answer.status in (200, 404), (place, answer)
            if answer.status == 200:
                shown[place[1]] = answer.headers["etag"]
        if bucket in sea.backed[1:] and listed[bucket].keys() == shown.keys():
            listed[bucket] = sea.listed(bucket)  # fetched again meanwhile, an object has the bucket service's ETag
        assert listed[bucket] == shown, bucket


def compare_backends(sea: Sea, crew: Crew) -> None:
    """After a flush the bucket service holds what the node shows, byte for byte, and nothing else."""
    state = {bucket["name"]: bucket for bucket in sea.node.json("GET", "status")["buckets"]}
    for bucket in sea.backed:
        assert not state[bucket].get("conflicts"), state[bucket]
        shown = {}
        for place in [*crew.places, *crew.sources]:
            answer = sea.ask("GET", f"/{place[0]}/{quote(place[1])}", {}, None)
            if place[0] == bucket and answer.status == 200:
                shown[place[1]] = answer.body
        assert set(sea.listed(bucket, sea.seaweed.endpoint)) == set(shown), bucket
        for key, body in shown.items():
            found = sea.behind(bucket, key)
            is_same = found == body  # what they say of themselves tells more than where they differ
            assert is_same, (bucket, key, found[:80], len(found), body[:80], len(body))


def open_files(sea: Sea) -> dict[str, int]:
    return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in sea.node.children().items() if alive(pid)}


def nothing_is_left_over(sea: Sea, before: dict[str, int]) -> None:
    """No temporary file, no part without an open upload, no descriptor."""
    for volume in (sea.first, sea.second):
        for name in ("tmp", "parts"):
            until(lambda at=volume / name: not [path for path in at.rglob("*") if path.is_file()], f"{name} is empty")
    after = until(lambda: len(found := open_files(sea)) == FRONTS + 1 and found, "all processes run")
    for name, count in after.items():
        assert count <= before[name] + 60, (name, before, after)
