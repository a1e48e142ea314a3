"""Decisions: machines that events step, and rules. Pure; shells in `node/` perform their effects."""
