"""Pagewire: LLM serving as four asynchronous gRPC services."""

__version__ = "0.1.0"
