"""What wraps any backend: counting, retrying, failing on purpose. `stack.py` alone puts them together."""
