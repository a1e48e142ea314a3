"""The number of samples in each shard, from the user or from an index beside the shards.

Theory. An index (`core/formats/samples.py`) has URLs that may be of another place, so a shard is known by the last part
of its key; the user may also give whole keys. The listing, which all ranks share, says whether there is an index.

These counts are promises: `len` believes them, and a shard with another number is an error when it is read. They have
no part in the order.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from forebay.core.errors import ForebayError, Invalid
from forebay.core.formats.listing import Listing
from forebay.core.formats.samples import INDEX, decode_index
from forebay.core.messages.batch import Item
from forebay.torch.columns import Column, ListingColumns
from forebay.torch.source import Facts, Patient


def told_counts(
    listing: Listing | None, columns: ListingColumns, source: Patient, counts: Mapping[str, int] | None
) -> Column | None:
    """The samples of each shard of `columns`: as `counts` says, else as an index in the listing does; None if nobody
    says it. `Invalid` where what `counts` says is not of all shards; an index that says less is not used."""
    if counts is not None:
        if not counts:
            return None
        found, missing = _matched(columns, counts)
        if missing:
            raise Invalid(f"counts= says nothing of {missing}: give a number for each shard, or leave it out")
        return found
    assert listing is not None, "it was listed just now"
    index = listing.prefix[: listing.prefix.rfind("/") + 1] + INDEX
    if listing.find(index) is None:
        return None
    (value,) = source.get_many([Item(columns.bucket, index)], Facts())
    if isinstance(value, ForebayError):
        raise value
    said = decode_index(value)
    if said is None:
        return None  # it is something else
    found, missing = _matched(columns, {shard.url: shard.nsamples for shard in said})
    return None if missing else found


def _matched(columns: ListingColumns, said: Mapping[str, int]) -> tuple[Column, str]:
    """What is said of each shard, and the key of one of which nothing is."""
    by_name: dict[str, int] = {}
    for name, samples in said.items():
        last = name.rpartition("/")[2]
        by_name[last] = samples if by_name.get(last, samples) == samples else -1
    found: Column = np.zeros(columns.objects, np.int64)
    for shard in range(columns.objects):
        key = columns.key(shard)
        samples = said.get(key, by_name.get(key.rpartition("/")[2], -1))
        if samples < 0:
            return found, key
        found[shard] = samples
    return found, ""
