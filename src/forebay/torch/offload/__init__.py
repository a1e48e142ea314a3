"""Offloading tensors by their lifetime: trace a step, plan moves, replay them, run them behind compute. See
docs/offload.md."""
