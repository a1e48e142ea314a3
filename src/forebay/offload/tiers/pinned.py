"""Pages of host memory that a tier owns, pinned when an accelerator first copies to or from them.

Theory. A device copies by itself, at the full speed of its link, only to and from pages that cannot be moved or
swapped. For others the driver copies through pages of its own. Pinning takes milliseconds and may hold up the device,
so the first transfer that needs it does it once. Moving host memory pins nothing and never starts CUDA.

Pages come from the kernel and are registered with the accelerator afterwards. torch's allocator of pinned memory rounds
up to powers of two, so a tensor of 1.1 GiB would take 2 (see MemAscend, arXiv 2505.23254).

Invariant. Pages are unpinned before they go back to the kernel.
"""

from __future__ import annotations

from forebay.core.errors import Unavailable
from forebay.offload.tiers.device_memory import Accelerator
from forebay.offload.tiers.queues import Array
from forebay.offload.tiers.tiers import page_aligned


class Pages:
    """`size_bytes` of new pages. Not for use by two threads at once."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.bytes: Array = page_aligned(size_bytes)
        self._address: int = self.bytes.__array_interface__["data"][0]
        self._pinned_by: Accelerator | None = None

    @property
    def pinned(self) -> bool:
        return self._pinned_by is not None

    def pin(self, accelerator: Accelerator) -> None:
        """Pin them if they are not yet. `Unavailable` if that fails: they serve as they are, and may be tried again."""
        if self._pinned_by is not None:
            return
        code = accelerator.pin(self._address, self.size_bytes)
        if code:
            raise Unavailable(
                f"pinning {self.size_bytes} bytes of host memory failed (the accelerator's error {code}): raise the "
                "limit on locked memory (ulimit -l), or give the host tier less room, or pinned=False"
            )
        self._pinned_by = accelerator

    def free(self) -> None:
        """Give the pages back, as soon as nobody looks at them. No copy to or from them is under way."""
        if self._pinned_by is not None:
            self._pinned_by.unpin(self._address)
            self._pinned_by = None
        self.bytes = None
