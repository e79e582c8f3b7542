"""The feature that computes requests with low-rank adapters (LoRA)."""
