"""Speculation: the number of tokens that a step drafts."""
