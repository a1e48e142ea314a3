"""Jobs of several identities: how many one of them starts changes nothing for another."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from forebay.core.errors import Busy, Invalid
from forebay.core.machines.hints import HintsCall
from forebay.core.messages import calls
from forebay.node.engine.jobs import hints, runner
from tests.engine.conftest import Rig
from tests.engine.test_hinting import Job, packed

Rigged = Callable[..., None]


def test_a_flood_of_jobs_pushes_out_nobody_elses(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "JOBS_KEPT_MAX", 3)

    async def story(rig: Rig) -> None:
        rig.remote.place("k", b"x" * 100)
        watched = await rig.front.job("prefetch", calls.JobCall("remote", identity="ops"))
        for _ in range(8):
            await rig.front.job("refresh", calls.JobCall("remote", identity="mallory"))
        assert (await rig.front.call("job", calls.JobNamed(watched.job))).state == "done"
        left = [state.identity for state in await rig.front.call("jobs", calls.Nothing())]
        assert left.count("mallory") in (3, 4), "the newest has just ended"
        monkeypatch.setattr(runner, "JOBS_KEPT_IN_ALL_MAX", 2)
        await rig.front.job("refresh", calls.JobCall("remote", identity="bob"))
        assert len(await rig.front.call("jobs", calls.Nothing())) <= 3

    rigged(story)


def test_nobody_has_more_jobs_under_way_than_one_may(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "JOBS_RUNNING_MAX", 2)

    async def story(rig: Rig) -> None:
        rig.remote.place("k", b"x" * 100)
        rig.remote.open.clear()
        started = [
            await rig.front.call("prefetch", calls.JobCall("remote", identity=identity))
            for identity in ("mallory", "mallory", "ops", "ops")
        ]
        with pytest.raises(Busy, match="2 of your jobs are under way"):
            await rig.front.call("prefetch", calls.JobCall("remote", identity="mallory"))
        rig.remote.open.set()
        assert [(await rig.front.ended(state)).state for state in started] == ["done"] * 4
        await rig.front.job("prefetch", calls.JobCall("remote", identity="mallory"))

    rigged(story)


def test_nobody_takes_all_the_hints_there_are(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "JOBS_OF_ONE_MAX", 2)

    async def story(rig: Rig) -> None:
        rig.remote.place("k", b"x" * 100)
        listing = (await Job(rig, "mine").open()).listing.id

        def tell(job: str, identity: str) -> HintsCall:
            return HintsCall(job, "remote", "", listing, 0, b"", identity=identity)

        for job in ("a", "b", "a"):
            await rig.front.call("hints", tell(job, "mallory"))
        with pytest.raises(Invalid, match="2 of your jobs give hints"):
            await rig.front.call("hints", tell("c", "mallory"))
        await rig.front.call("hints", tell("c", "ops"))
        monkeypatch.setattr(hints, "USES_OF_ONE_MAX", 3)
        use = packed([(0, 0, 1), (0, 0, 1)])
        await rig.front.call("hints", msgspec.structs.replace(tell("a", "mallory"), accesses=use))
        await rig.front.call("hints", msgspec.structs.replace(tell("a", "mallory"), accesses=use))  # in place of it
        with pytest.raises(Invalid, match="more than 3 uses ahead"):
            await rig.front.call("hints", msgspec.structs.replace(tell("b", "mallory"), accesses=use))
        await rig.front.call("hints", msgspec.structs.replace(tell("c", "ops"), accesses=use))

    rigged(story)
