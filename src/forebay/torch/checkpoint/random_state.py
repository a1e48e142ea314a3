"""The random generators of this process as something to save: a run that resumes draws what it would have drawn."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from forebay.core.errors import Invalid


class RandomState:
    """Python's, NumPy's and torch's generators, the GPUs' too. Save it under a name that is each rank's own ("rng")."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),  # the old generator is what libraries draw from
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """`Invalid` if it was saved with another number of GPUs."""
        if differs := other_gpus(state):
            raise Invalid(f"the random state {differs}: leave it out")
        gpus = state["cuda"]
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if gpus:
            torch.cuda.set_rng_state_all(gpus)


def other_gpus(state: dict[str, Any]) -> str:
    """In words, that the state was saved with another number of GPUs; empty if it was not, or with none in use."""
    saved, here = len(state["cuda"]), torch.cuda.device_count()
    return f"is of {saved} GPUs, and {here} are here" if saved and saved != here else ""
