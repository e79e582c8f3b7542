"""The CPU ops in C++, compiled on first use.

Importing a module that calls C++ raises BuildError where the kernels cannot be compiled.
"""
