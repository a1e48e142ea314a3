"""The one writer of a store, and what it does to keep it sound. No front imports it."""
