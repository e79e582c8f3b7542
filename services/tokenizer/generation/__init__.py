"""Requests for text, from submission to the last delta."""
