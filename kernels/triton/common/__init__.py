"""Parts of kernels in several rooms: launches, counters, conversions of numbers."""
