"""Training of what rounding has left: one layer, or the whole model."""
