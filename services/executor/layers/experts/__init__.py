"""Layers of experts, and the routing of tokens to them."""
