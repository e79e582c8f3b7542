"""Attention over the paged KV cache, and kernels that write to it."""
