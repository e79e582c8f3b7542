"""Attention without a cache, in both directions."""
