"""Writes: puts, deletes, uploads, copies, appends, tags, and bodies on their way to a backend."""
