"""Layouts of packed weights, in plain torch."""
