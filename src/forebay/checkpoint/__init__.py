"""Checkpoints of a run on a bucket, without torch: what there is, whether it verifies, what may go."""
