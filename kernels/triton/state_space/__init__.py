"""Layers with a state (Mamba-2): the convolution before it, its recurrence, and the norm behind it."""
