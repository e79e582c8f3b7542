"""Parsers of tool calls, one file for each family of formats."""
