"""What of S3 is only there for compatibility, off the path of a normal request."""
