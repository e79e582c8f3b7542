"""Attention over latent vectors (MLA), and what writes them to the cache."""
