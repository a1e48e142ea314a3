"""The messages between processes, front and engine or client and front, and their frames."""
