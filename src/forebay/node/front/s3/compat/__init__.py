"""What clients of S3 expect beyond the interface of our design. No plain GET or PUT of an object comes here."""
