"""The kernels on a CPU: in C++, and in torch."""
