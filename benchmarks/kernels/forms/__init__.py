"""The forms that kernels are compiled in."""
