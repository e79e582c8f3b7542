"""Requests of which the answer has several outputs."""
