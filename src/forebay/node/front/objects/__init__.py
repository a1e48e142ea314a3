"""Objects for every API: reads, writes, shards, and the fast lane of plain hits."""
