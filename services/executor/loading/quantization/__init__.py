"""How checkpoints store quantized weights: one module per format, each from its tensors to `kernels.quantized`."""

from pagewire.services.executor.loading.quantization.formats import Quantization, TensorSpec, WeightFormat

__all__ = ["Quantization", "TensorSpec", "WeightFormat"]
