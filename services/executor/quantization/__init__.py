"""How checkpoints store quantized weights: one module per format, each from its tensors to `kernels.quantized`."""

from services.executor.quantization.formats import Quantization, TensorSpec, WeightFormat

__all__ = ["Quantization", "TensorSpec", "WeightFormat"]
