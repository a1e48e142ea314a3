"""Gets a listing from the node: the same one for every process of a job.

Theory. The node makes the listing; the client only waits. Until it is ready the node answers 202 with its progress, and
the flow asks again at once (the node waits before it answers). The listing is checked against its id before use.

Invariant. A returned listing is whole and is what its id says.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from forebay.client import flows
from forebay.core.errors import Corrupt
from forebay.core.formats.listing import Listing, ListingState
from forebay.core.messages.http1 import Request, encode_path, with_query

Progress = Callable[[int], None]


def listing(
    bucket: str,
    prefix: str = "",
    *,
    id: str | None = None,
    refresh: bool = False,
    versions: bool = False,
    progress: Progress | None = None,
) -> flows.Flow[Listing]:
    """The listing of everything under a prefix; with `versions`, of the newest version of each object. With `id`
    exactly that one, else `Precondition` says what changed.

    `progress` is called with the number of objects listed so far, every few seconds while the node is still listing.
    """
    what, since = f"the listing of {bucket}/{prefix}", ""
    while True:
        query = (
            ("prefix", prefix),
            ("id", id or ""),
            ("refresh", "1" if refresh else ""),
            ("since", since),
            ("versions", "1" if versions else ""),
        )
        response = yield Request("GET", with_query(encode_path("-/v1/listing", bucket), query))
        if not response.ok:
            raise flows.raised(response, what)
        if response.status == 200:
            return Listing(response.body)
        try:
            state = msgspec.json.decode(response.body, type=ListingState)
        except msgspec.DecodeError as error:
            raise Corrupt(
                f"{what}: the answer is not of the shape expected ({error}): check what listens there"
            ) from None
        since = repr(state.since_s)
        if progress is not None:
            progress(state.objects)
