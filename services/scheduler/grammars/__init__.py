"""The feature that compiles grammars before requests with them wait for a place in a step."""
