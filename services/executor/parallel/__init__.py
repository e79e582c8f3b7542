"""The ranks that serve a model together, and what goes between them within a step."""
