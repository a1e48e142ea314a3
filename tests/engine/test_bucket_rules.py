"""Buckets made once, and changed without losing each other's changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from forebay.core.errors import Busy, Denied, Exists, NotFound
from forebay.core.messages import calls
from forebay.core.types import LOCAL_URL, Bucket, CorsRule

from .conftest import Front, Rig, until
from .writing import flushed, put, written

RULES = (CorsRule(("*",), ("GET",)),)


def test_one_of_two_makes_the_bucket(rigged: Callable[..., None]) -> None:
    async def story(rig: Rig) -> None:
        bucket = Bucket("fresh", LOCAL_URL, write="local")
        outcomes = await asyncio.gather(
            *(rig.front.call("bucket_create", bucket) for _ in range(4)), return_exceptions=True
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, Exists)]
        assert len(refused) == 3
        assert {error.code for error in refused} == {"BucketAlreadyOwnedByYou"}

    rigged(story)


def test_changes_made_at_once_all_hold(rigged: Callable[..., None]) -> None:
    async def story(rig: Rig) -> None:
        await asyncio.gather(
            rig.front.call("bucket_rules", calls.BucketRulesCall("remote", acl="public-read")),
            rig.front.call("bucket_rules", calls.BucketRulesCall("remote", cors=RULES)),
        )
        await rig.again()
        (bucket,) = await rig.front.call("buckets", calls.Nothing())
        assert (bucket.acl, bucket.cors) == ("public-read", RULES)
        assert rig.front.welcomes[-1].buckets == [bucket], "fronts know it"
        await rig.front.call("bucket_rules", calls.BucketRulesCall("remote", cors=()))
        (bucket,) = await rig.front.call("buckets", calls.Nothing())
        assert (bucket.acl, bucket.cors) == ("public-read", ())
        with pytest.raises(NotFound):
            await rig.front.call("bucket_rules", calls.BucketRulesCall("none", acl="private"))

    rigged(story)


def test_a_change_is_acknowledged_when_all_fronts_act_on_it(rigged: Callable[..., None]) -> None:
    async def story(rig: Rig) -> None:
        behind = Front()
        await behind.connect(rig.settings, 2)
        behind.listens.clear()
        asked = asyncio.create_task(rig.front.call("bucket_rules", calls.BucketRulesCall("remote", acl="public-read")))
        await until(lambda: rig.front.welcomes[-1].buckets[0].acl == "public-read")
        await rig.front.call("buckets")
        assert not asked.done(), "a front still serves by the rules of before"
        behind.listens.set()
        await asked
        assert behind.welcomes[-1].buckets[0].acl == "public-read"
        behind.task.cancel()
        behind._writer.close()

    rigged(story)


def test_a_bucket_that_owes_or_is_the_only_place_is_not_deleted(rigged: Callable[..., None]) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back")
        rig.remote.writable.clear()
        await put(rig, "key", b"data")
        with pytest.raises(Busy, match="forebay flush remote"):
            await rig.front.call("bucket_delete", calls.BucketNamed("remote"))
        assert await rig.front.get("key") == b"data"
        await flushed(rig)
        await rig.front.call("bucket_delete", calls.BucketNamed("remote"))
        assert (await rig.remote.objects.head("key")).size_bytes == 4

    rigged(story)


# --- buckets that belong to who made them ----------------------------------------------------------------------------
def made(name: str, maker: str, **more: object) -> calls.BucketPutCall:
    return calls.BucketPutCall(Bucket(name, LOCAL_URL, write="local", **more), maker=maker)  # type: ignore[arg-type]


def test_a_bucket_belongs_to_who_made_it_also_after_a_restart(rigged: Callable[..., None]) -> None:
    async def story(rig: Rig) -> None:
        assert (await rig.front.call("bucket_put", made("one", "ann"))).owner == "ann"
        assert (
            await rig.front.call("bucket_create", Bucket("two", LOCAL_URL, write="local", owner="ben"))
        ).owner == "ben"
        await rig.again()
        kept = await rig.front.call("bucket_put", made("one", "ann", quota_bytes=1 << 30, owner="ben"))
        assert (kept.owner, kept.quota_bytes) == ("ann", 1 << 30), "nobody gives it away"
        assert {bucket.name: bucket.owner for bucket in rig.front.welcomes[-1].buckets} == {
            "one": "ann", "two": "ben", "remote": "",
        }  # fmt: skip
        for maker, name in (("ben", "one"), ("ann", "two"), ("ann", "remote")):
            with pytest.raises(Exists, match="somebody else") as caught:
                await rig.front.call("bucket_put", made(name, maker))
            assert caught.value.code == "BucketAlreadyExists"
            with pytest.raises(Exists):
                await rig.front.call("bucket_create", Bucket(name, LOCAL_URL, write="local", owner=maker))
            with pytest.raises(Denied, match="did not make"):
                await rig.front.call("bucket_delete", calls.BucketNamed(name, force=True, maker=maker))
            with pytest.raises(Denied, match="did not make"):
                await rig.front.call("bucket_rules", calls.BucketRulesCall(name, acl="public-read", maker=maker))
        assert (await rig.front.call("bucket_put", made("one", ""))).owner == "ann", (
            "an admin's change leaves it theirs"
        )
        await rig.front.call("bucket_delete", calls.BucketNamed("one", maker="ann"))
        assert (await rig.front.call("bucket_put", made("one", ""))).owner == "", "made anew, it is another bucket"

    rigged(story)


def test_one_of_two_makers_has_the_bucket(rigged: Callable[..., None]) -> None:
    async def story(rig: Rig) -> None:
        outcomes = await asyncio.gather(
            *(rig.front.call("bucket_put", made("fresh", maker)) for maker in ("ann", "ben", "cas")),
            return_exceptions=True,
        )
        (kept,) = [outcome for outcome in outcomes if isinstance(outcome, Bucket)]
        assert [type(outcome) for outcome in outcomes if outcome is not kept] == [Exists, Exists]
        assert rig.front.welcomes[-1].buckets[0].owner == kept.owner

    rigged(story)


def test_a_change_that_was_tried_out_for_long_does_not_land_on_another_bucket(rigged: Callable[..., None]) -> None:
    async def story(rig: Rig) -> None:
        place = Bucket("spare", "memory://remote", write="back")
        for old in (None, place):
            if old is not None:
                await rig.front.call("bucket_put", calls.BucketPutCall(old, maker="ann", free=True))
            rig.remote.writable.clear()
            wanted = calls.BucketPutCall(place, check=True, maker="ann", free=True)
            trying = asyncio.create_task(rig.front.call("bucket_put", wanted))
            await until(lambda: rig.remote.count("put") > 0)
            if old is not None:
                await rig.front.call("bucket_delete", calls.BucketNamed("spare", maker="ann"))
            await rig.front.call("bucket_create", Bucket("spare", LOCAL_URL, write="local", owner="ben"))
            rig.remote.writable.set()
            with pytest.raises(Exists if old is None else Busy):
                await trying
            (now,) = [bucket for bucket in rig.front.welcomes[-1].buckets if bucket.name == "spare"]
            assert (now.owner, now.url) == ("ben", LOCAL_URL)
            await rig.front.call("bucket_delete", calls.BucketNamed("spare"))
            rig.remote.asked.clear()

    rigged(story)


def test_jobs_go_with_their_bucket(rigged: Callable[..., None]) -> None:
    async def story(rig: Rig) -> None:
        await rig.front.call("bucket_put", made("one", "ann"))
        begun = await rig.front.call("prefetch", calls.JobCall("one", keys=["anns-secret"], identity="ann"))
        await rig.front.call("refresh", calls.JobCall("remote", identity="ann"))
        await rig.front.call("bucket_delete", calls.BucketNamed("one", maker="ann"))
        await rig.front.call("bucket_put", made("one", "ben"))
        assert [state.bucket for state in await rig.front.call("jobs", calls.Nothing())] == ["remote"]
        with pytest.raises(NotFound):
            await rig.front.call("job", calls.JobNamed(begun.job))

    rigged(story)
