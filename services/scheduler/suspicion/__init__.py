"""Requests that may have crashed an executor: they run alone until they are cleared, or end."""
