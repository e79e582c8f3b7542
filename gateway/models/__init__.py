"""The served models, and text as their tokens."""
