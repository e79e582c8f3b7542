"""Drafted tokens: found in a row's own text, and accepted."""
