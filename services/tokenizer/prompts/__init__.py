"""Prompts: from what a request contains to token ids."""
