"""Embeddings, scores, ranks and classes: what asks for vectors instead of tokens."""
