"""The served models, their lines, and text as their tokens."""
