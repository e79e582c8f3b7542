"""Drafted tokens: found in texts, and accepted."""
