"""A dataset in which each object is a sample.

Theory. The simplest layout: one file for each image or document. Opened one by one it is the slowest. Read by the batch
it needs no repacking.

Invariant. Sample i is the object with the i-th key in byte order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from forebay.core.formats.listing import Listing
from forebay.core.spelling import known_arguments
from forebay.ports import clock
from forebay.torch.columns import Column
from forebay.torch.dataset import (
    Accesses,
    Dataset,
    OnError,
    decoded,
    frees_lock,
    parameters,
    runs,
    whole,
    whole_objects,
)
from forebay.torch.decoders import Pictures
from forebay.torch.source import PATIENCE_S, Bytes, Facts, Source
from forebay.torch.switch import DIRECT_AFTER_S


class ObjectDataset(Dataset):
    """The objects under `place` ('bucket/prefix', 'forebay://bucket/prefix' or 's3://bucket/prefix').

    A sample is what `decode(key, data)` returns, with `data` bytes or a memoryview of them; without it, `bytes`. One
    with a parameter `epoch` is told the loader's (None without our sampler), to seed what it draws. `Pictures()` may
    stand for one. Only keys that end in one of `suffixes` count; or those in `keys`, or in `listing` if nothing of it
    has changed, and no others; or the versions in `versions` (of `Client.listing(…, versions=True)`), whatever has
    changed.
    `on_error`: 'raise', or 'skip' what is missing or cannot be decoded. `patience_s`: how long to wait for a node
    that does not answer; after `direct_after_s` of that the bucket's backend is read instead, where it can be (None:
    never), and `direct` says how (`{"url": "s3://…", …options…}`) where what the node says of the bucket does not do.
    `url` as of `forebay.connect`.
    """

    shape = "objects"

    @known_arguments
    def __init__(
        self,
        place: str,
        *,
        decode: Callable[..., Any] | Pictures | None = None,
        suffixes: Sequence[str] = (),
        url: str | None = None,
        on_error: OnError = "raise",
        patience_s: float = PATIENCE_S,
        direct_after_s: float | None = DIRECT_AFTER_S,
        direct: Mapping[str, str] | None = None,
        source: Source | None = None,
        keys: Sequence[str] | None = None,
        listing: Listing | bytes | None = None,
        versions: Listing | bytes | None = None,
    ) -> None:
        super().__init__(
            place,
            suffixes=[suffixes] if isinstance(suffixes, str) else suffixes,
            url=url,
            on_error=on_error,
            patience_s=patience_s,
            direct_after_s=direct_after_s,
            direct=direct,
            source=source,
            keys=keys,
            listing=listing,
            versions=versions,
        )
        self.decode, self._with_epoch = decode, bool(parameters(decode))
        self.samples = self.listing.objects

    def key(self, index: int) -> str:
        """The key of a sample."""
        return self.listing.key(index)

    def blocks(self) -> tuple[Column, Column]:
        return runs(self.listing.sizes)

    def sizes(self, indices: Column) -> Column:
        return self.listing.sizes[indices]

    def accesses(self, indices: Column) -> Accesses:
        return whole(self.listing, indices)

    def fetch(self, indices: Sequence[int], facts: Facts) -> list[Any]:
        items = whole_objects(self.listing, indices)
        made: list[Any] = self._source.get_many(items, facts)
        facts.unlocked = facts.unlocked or frees_lock([self.decode])
        began_s = clock.monotonic_s()
        for number, value in enumerate(made):
            if isinstance(value, Exception):
                continue
            facts.size_bytes += len(value)
            made[number] = self._made(items[number].key, value, facts.epoch)
        facts.decode_s += clock.monotonic_s() - began_s
        return self._kept(lambda number: f"{items[number].bucket}/{items[number].key}", made, facts)

    def _made(self, key: str, value: Bytes, epoch: int | None) -> Any:
        decode: Any = self.decode
        if decode is None:
            return value if type(value) is bytes else bytes(value)
        told = (value,) if isinstance(decode, Pictures) else (key, value)
        if self._with_epoch:
            decode = partial(decode, epoch=epoch)
        return decoded(lambda: f"{self.listing.bucket}/{key}", decode, *told)
