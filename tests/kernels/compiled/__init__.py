"""The Triton kernels compiled ahead of time."""
