"""The Triton kernels in the interpreter; modules that are no tests run in processes of their own."""
