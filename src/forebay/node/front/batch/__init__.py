"""Many reads in one request."""
