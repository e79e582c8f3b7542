"""Choosing tokens: sampling parameters as columns, the sampler, log probabilities and constraints."""
