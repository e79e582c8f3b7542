"""Sampling: from logits to the next token, all rows at once."""
