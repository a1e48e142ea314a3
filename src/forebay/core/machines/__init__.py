"""Decisions: machines that step on events, and rules. Pure; shells in `node/` perform their effects."""
