"""Processes: how they start, end, are watched and bound to CPUs."""
