"""The audit log of a front: who asked for what, from where, and what came of it."""
