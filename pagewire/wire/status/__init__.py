"""Errors with a gRPC status: in Python, in messages, in calls."""
