"""The weights that executors serve, and their replacement, one executor at a time."""
