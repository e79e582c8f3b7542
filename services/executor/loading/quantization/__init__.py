"""How checkpoints store quantized weights: one module per format, each from its tensors to `kernels.quantized`."""
