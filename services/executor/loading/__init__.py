"""Loading: a checkpoint becomes a model with weights."""
