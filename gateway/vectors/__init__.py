"""Embeddings, scores, ranks and classes: requests for vectors instead of tokens."""
