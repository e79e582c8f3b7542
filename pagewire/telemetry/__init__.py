"""Metrics, spans and logs, the same for every service."""
