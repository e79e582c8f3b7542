"""The pieces models are made of. Plain classes: `__call__` runs, `load_targets` says where weights belong."""
