"""Rows that need a CUDA device, and what to look at first with one."""
