"""Writing back what the node owes."""
