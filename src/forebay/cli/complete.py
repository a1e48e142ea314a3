"""Shell completion of bucket names and keys, from the node.

Theory. The shell starts the program for each Tab, so this must be quick: one page of a listing, with a short patience.
It never prints an error; without a node it suggests nothing. Bash breaks words at `:`, so for `s3://cor` the program
gets `//cor` and must answer in kind.
"""

from __future__ import annotations

from typing import Any

PATIENCE_S = 1.5  # a person waits for Tab
SUGGESTIONS_MAX = 200  # more helps nobody on a terminal


def bucket_names(ctx: Any, incomplete: str) -> list[str]:
    """The buckets that begin as typed."""
    try:
        with _client(ctx) as client:
            return [bucket.name for bucket in client.buckets() if bucket.name.startswith(incomplete)]
    except Exception:
        return []


def addresses(ctx: Any, incomplete: str) -> list[str]:
    """The addresses that begin as typed: buckets first, then one level of keys at a time."""
    lead = next((lead for lead in ("s3://", "//") if incomplete.startswith(lead)), "")
    bucket, slash, prefix = incomplete[len(lead) :].partition("/")
    try:
        with _client(ctx) as client:
            if not slash:
                return [f"{lead}{found.name}/" for found in client.buckets() if found.name.startswith(bucket)]
            page = client.list_page(bucket, prefix, delimiter="/", limit=SUGGESTIONS_MAX)
            names = sorted([*page.prefixes, *(entry.key for entry in page.entries)])
            return [f"{lead}{bucket}/{name}" for name in names if name.isprintable()]
    except Exception:
        return []


def _client(ctx: Any) -> Any:
    from forebay.client.sync import connect

    return connect(ctx.params.get("url"), patience_s=PATIENCE_S)
