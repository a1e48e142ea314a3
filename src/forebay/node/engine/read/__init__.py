"""Reads that the engine answers: cold objects, pages of listings, whole listings."""
