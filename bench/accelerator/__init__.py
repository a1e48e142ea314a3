"""An emulated accelerator that clients feed: the program that runs it, and its rows."""
