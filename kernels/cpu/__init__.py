"""The CPU ops in C++, compiled on first use.

Importing a module that calls C++ raises BuildError if the kernels cannot be compiled.
"""
