"""The ranks that serve a model together, and the data that they exchange within a step."""
