"""Model code, and `registry.py`: the one place where an architecture is announced."""
