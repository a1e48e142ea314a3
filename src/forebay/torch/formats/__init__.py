"""Datasets in the formats of other libraries, read where they lie."""
