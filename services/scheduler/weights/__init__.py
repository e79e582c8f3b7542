"""Which weights executors serve, and replacing them one executor after the other."""
