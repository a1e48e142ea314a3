"""Backends on this machine: a directory, memory, and none."""
