"""The kernels of CUDA devices, in Triton."""
