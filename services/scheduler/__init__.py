"""The scheduler service: continuous batching at token level. It knows tokens and blocks, never tensors."""
