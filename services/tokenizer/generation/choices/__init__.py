"""Calls with several outputs: choices, the best of several, beam search."""
