"""Products with weights: dense, grouped, fp8 and int8."""
