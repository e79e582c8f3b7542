"""Prompts of requests, which become token ids."""
