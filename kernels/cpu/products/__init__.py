"""Products with weights: dense, packed and grouped."""
