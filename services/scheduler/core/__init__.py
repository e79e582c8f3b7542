"""Scheduling: which requests run in each step. No file here does I/O."""
