"""`config.json` as the executor reads it."""
