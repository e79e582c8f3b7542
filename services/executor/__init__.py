"""The executor service: one device, its weights, its KV cache, its steps."""

import os

# torch's OpenMP threads spin for milliseconds after each parallel operation, on cores that the other services need.
# The C++ kernels have separate threads, which `kernels` makes.
# The variable is read when the OpenMP runtime is loaded, so it must be set before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
