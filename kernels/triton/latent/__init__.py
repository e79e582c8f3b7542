"""Attention over latent vectors (MLA), and kernels that write them to the cache."""
