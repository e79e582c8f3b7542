"""Embeddings, scores and classes."""
