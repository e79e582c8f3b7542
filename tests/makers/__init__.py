"""Makers of data for tests: certificates, GGUF files, sampling parameters, checkpoints."""
