"""Rounding of weights: grids, methods, one decoder layer at a time."""
