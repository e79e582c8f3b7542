"""The sleep of the model: why it begins, what waits meanwhile, and what wakes it."""
