"""How weights are rounded: grids, methods, one decoder layer at a time."""
