"""Attention: paged, latent, and of encoders."""
