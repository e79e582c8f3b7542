"""Models of what steps cost and of how many drafts are right."""
