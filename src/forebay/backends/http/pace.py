"""Chooses the size of a body's chunks by how fast its endpoint sends.

Theory. Each chunk costs a fixed amount of CPU, as much as 100 KiB of its bytes do, and delays the reader's first byte
until it is full. So a chunk is what the endpoint sends in CHUNK_S, over all open bodies together: the least behind a
slow link, four times as much behind one that fills a core. A stream cannot change its chunk size, and most bodies are
short, so the pace is kept per endpoint, across buckets, and not learned anew by each body.

Time without an open body and time spent waiting for an answer say nothing about the endpoint and are not counted.

Rejected: a pace per connection (many slow connections keep a core as busy as one fast one); always large chunks (at 50
MB/s the first byte would come 8 ms later).
"""

from __future__ import annotations

from functools import lru_cache

from forebay.core import limits

CHUNK_BYTES_MIN = 128 * limits.KIB  # less costs more CPU than the first byte gains: 0.7 ms at 200 MB/s
CHUNK_BYTES_MAX = 512 * limits.KIB
CHUNK_S = 0.001
SAMPLE_BYTES = 4 * limits.MIB  # the pace is that of the last so many bytes, or more
ENDPOINTS_KEPT = 256


class Pace:
    """What is known of one endpoint. Times are monotonic; `began` and `ended` come once for each body."""

    def __init__(self) -> None:
        self.chunk_bytes = CHUNK_BYTES_MIN
        self._open = 0
        self._since_s = 0.0  # when bodies were last open after none was, or the last sample ended
        self._busy_s = 0.0  # of the sample, before then
        self._got_bytes = 0  # of the sample

    def began(self, now_s: float) -> None:
        """The first chunk of a body came."""
        if self._open == 0:
            self._since_s = now_s
        self._open += 1

    def came(self, now_s: float, size_bytes: int) -> None:
        """A chunk came after the first."""
        self._got_bytes += size_bytes
        busy_s = self._busy_s + now_s - self._since_s
        if self._got_bytes >= SAMPLE_BYTES and busy_s > 0:
            sent_bytes = min(self._got_bytes / busy_s * CHUNK_S, CHUNK_BYTES_MAX)  # may be infinite before
            self.chunk_bytes = max(CHUNK_BYTES_MIN, int(sent_bytes))
            self._since_s, self._busy_s, self._got_bytes = now_s, 0.0, 0

    def ended(self, now_s: float) -> None:
        """A body that began is at its end, or given up."""
        self._open = max(0, self._open - 1)  # loops of several threads may share an endpoint: a guess needs no lock
        if self._open == 0:
            self._busy_s += now_s - self._since_s


@lru_cache(ENDPOINTS_KEPT)
def pace_of(endpoint: str) -> Pace:
    """The pace of the endpoint at this URL: the same object for all who ask, as long as it is among the last used."""
    return Pace()
