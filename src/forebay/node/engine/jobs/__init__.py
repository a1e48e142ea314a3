"""Work in the background that somebody asked for: prefetch, evict, pin, hints."""
