"""Processes: what starts, joins and ends them. The supervisor, and the programs that it starts."""
