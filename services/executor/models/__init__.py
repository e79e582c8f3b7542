"""Model code, and `registry.py`: the one place where architectures are registered."""
