"""What kernels of several rooms use: launches, counters, conversions of numbers."""
