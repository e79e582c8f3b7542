"""Decoders with dense MLPs."""
