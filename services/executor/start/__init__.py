"""The start of an executor, up to the first step."""
