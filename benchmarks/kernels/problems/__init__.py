"""Inputs on which kernels with tuning tables are timed."""
