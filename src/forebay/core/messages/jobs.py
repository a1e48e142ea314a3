"""Jobs as they are asked for and told of.

Theory. Plain values, sent like those of `calls.py`. People read a state as JSON, so its fields have names, and fields
can be added with defaults.

Invariant. A state holds what was true of the job at one moment.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from forebay.core.errors import NotFound

JobVerb = Literal["prefetch", "pin", "unpin", "evict", "refresh", "flush", "rewarm"]


class JobCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which objects of `bucket` to work on: all under `prefix`, or exactly `keys` when given (then `prefix` is "").
    `identity` is who asks, as the front knows it; "" on a node without identities. `share`: fetch only what is at home
    at this node, since all nodes are asked. Of a rewarm the one key is the manifest's."""

    bucket: str
    prefix: str = ""
    keys: list[str] = []
    dry_run: bool = False
    identity: str = ""
    share: bool = False


class JobNamed(msgspec.Struct, frozen=True):
    job: str


def no_such_job(job: str) -> NotFound:
    """A job that never existed, was forgotten, or is somebody else's."""
    return NotFound(f"there is no job {job!r}: `forebay job ls` lists those that are known")


class JobState(msgspec.Struct, frozen=True):
    """A job's progress. A total is None until the plan is complete; `errors` holds the first few, for people."""

    job: str
    verb: str
    bucket: str
    prefix: str = ""
    state: Literal["running", "done", "failed", "cancelled"] = "running"
    units_done: int = 0
    units_failed: int = 0
    units_total: int | None = None
    bytes_done: int = 0
    bytes_total: int | None = None
    started_s: float = 0.0
    ended_s: float | None = None
    errors: list[str] = []
    identity: str = ""  # who began it
