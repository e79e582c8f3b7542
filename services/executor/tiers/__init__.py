"""Tiers of KV memory: copies of full blocks in memory of the host and in a directory."""
