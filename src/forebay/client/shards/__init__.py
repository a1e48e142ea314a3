"""Writing shards of samples, to a bucket or a folder."""
