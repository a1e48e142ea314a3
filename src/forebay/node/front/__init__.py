"""What runs in a front's process: it talks to clients, reads the store, and asks the engine."""
