"""The building blocks of models. Plain classes: `__call__` runs one, `load_targets` lists the memory of its weights."""
