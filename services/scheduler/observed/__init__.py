"""Metrics, status, timelines and log lines."""
