"""CPU ops in torch and numpy, where that is faster than the reference: for machines without a C++ compiler.

They also serve beside the C++ ops, for what these leave out.
"""
