"""Stored forms of quantized weights: one module per format, each from its tensors to `kernels.quantized`."""
