"""Saves a training job's state to a bucket through the tier, and restores it: `Checkpointer` is what a script uses."""
