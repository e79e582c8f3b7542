"""Parsers of reasoning."""
