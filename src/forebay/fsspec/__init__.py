"""`forebay://` for fsspec."""
