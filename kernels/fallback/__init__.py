"""CPU ops in torch and numpy, if they are faster than the reference: for machines without a C++ compiler.

They are also used for cases that the C++ ops do not cover.
"""
