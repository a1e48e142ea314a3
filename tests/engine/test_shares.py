"""A quick reader among many slow ones: it is served from what they leave, at once."""

from __future__ import annotations

from collections.abc import Callable

from forebay.core import limits

from .conftest import MIB, Rig, pattern, until

Rigged = Callable[..., None]
SLOW = 200


def test_a_quick_cold_read_passes_two_hundred_readers_whose_read_ahead_is_under_way(rigged: Rigged) -> None:
    """None of their requests ever ends meanwhile, so nothing but its own turn can serve the newcomer."""

    async def story(rig: Rig) -> None:
        data = pattern(40 * MIB)
        for number in range(SLOW):
            rig.remote.place(f"slow/{number}", data)
        rig.remote.place("quick", data)
        rig.remote.open.clear()
        rig.remote.ungated = {"quick"}
        slow = [rig.front.open(f"slow/{number}") for number in range(SLOW)]
        permits = rig.engine.cold.permits("remote").shares
        await until(lambda: rig.remote.count("fetch") == SLOW + limits.FETCHES_AHEAD_MAX)
        await until(lambda: len(permits.claims) > limits.FETCHES_MAX)
        assert await rig.front.get("quick") == data
        assert rig.remote.count("fetch") < SLOW + limits.FETCHES_AHEAD_MAX + 8, "no other request was served for it"
        for read in slow:
            read.close()
        rig.remote.open.set()
        await rig.idle()
        assert not permits.claims

    rigged(story)
