"""From a checkpoint to a model with weights."""
