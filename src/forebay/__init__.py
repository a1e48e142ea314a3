"""Forebay: a fast tier of local disks between object storage and GPUs. See README.md; the design is in docs/design."""

from __future__ import annotations

if not __debug__:
    raise RuntimeError("Forebay's asserts guard data and stay on: run Python without -O and without PYTHONOPTIMIZE")

__version__ = "0.1.0"
__all__ = ["__version__"]
