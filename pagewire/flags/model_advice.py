"""Advice about the weights of the model at hand."""

from pagewire.config import ExecutorConfig
from pagewire.flags.model_facts import ModelFacts

FEW_BITS = 6  # of weights for which 4 bits gain little
_QUANTIZED = 8


def smaller_weights(config: ExecutorConfig, model: ModelFacts | None) -> str:
    """Returns what makes the weights smaller, so that they fit or are read sooner. model: None if it is not known."""
    bits = 0 if model is None else model.bits
    if config.quantization == "none" and 0 < bits <= _QUANTIZED:
        return f"the weights as they are stored, in {bits} bits (without --quantization none)"
    if 0 < bits <= FEW_BITS:
        return f"a smaller model (the weights have {bits} bits already)"
    return "weights in 4 bits (pagewire quantize, from a checkpoint in 16 bits)"
