"""Background work on request: prefetch, evict, pin, hints."""
