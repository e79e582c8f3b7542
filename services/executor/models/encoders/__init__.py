"""Encoders, which return vectors."""
