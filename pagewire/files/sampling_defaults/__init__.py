"""Defaults of sampling parameters: those of the operator, of the model's files, and of its authors."""
