"""Rules of S3 that no data path needs: CORS, form uploads and their policies, signatures of version 2."""
