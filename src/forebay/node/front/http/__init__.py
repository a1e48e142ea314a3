"""HTTP/1.1 as such: connections, requests, bodies, checksums, identities."""
