"""Jobs: bounded plans of units that the engine works off in the background."""
