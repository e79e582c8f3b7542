"""Parts that kernels of several folders share: launches, counters, conversions of numbers."""
