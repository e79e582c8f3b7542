"""Heads that draft tokens for another model."""
