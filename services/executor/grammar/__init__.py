"""Grammars: what an output must look like, compiled for the model's vocabulary, and a place in it for each request."""
