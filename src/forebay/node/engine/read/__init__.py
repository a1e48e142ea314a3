"""Reads that the engine answers: cold objects, listings, manifests."""
