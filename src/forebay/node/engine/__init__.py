"""What runs in the engine's process: the one writer of a node."""
