"""The feature that chooses among replicas for a waiting request: by load and cached prefixes."""
