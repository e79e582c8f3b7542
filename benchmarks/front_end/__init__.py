"""Measures the cost of the REST front end, with a scripted engine behind it: `python -m benchmarks.front_end`."""
