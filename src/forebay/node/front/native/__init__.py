"""The native API under `/-/`."""
