"""The values that a step consists of."""
