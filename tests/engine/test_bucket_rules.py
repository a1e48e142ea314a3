"""Buckets made once, and changed without losing each other's changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from forebay.core.errors import Busy, Exists, NotFound
from forebay.core.messages import calls
from forebay.core.types import LOCAL_URL, Bucket, CorsRule

from .conftest import Rig
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
