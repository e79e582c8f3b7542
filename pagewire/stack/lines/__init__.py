"""The lines of a stack, one for each model: their processes, their memory, and when they start, sleep and end."""
