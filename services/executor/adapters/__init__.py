"""Adapters (LoRA): small weights that are added to those of a model's layers, for the requests that name them."""
