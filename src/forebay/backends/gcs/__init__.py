"""Google Cloud Storage: what differs from S3's protocol."""
