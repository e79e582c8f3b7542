"""Flags that a model refuses, and the sentences for it: commands check them by the model's files before they start
anything, the executor while it loads the model."""

# vLLM's further names of formats of quantized checkpoints.
FORMAT_ALIASES = {"awq_marlin": "awq", "gptq_marlin": "gptq"}
# Files in which early tools wrote what is now `quantization_config` in config.json.
FORMAT_FILES = {"awq": "quant_config.json", "gptq": "quantize_config.json"}


def of_quantization(requested: str | None, found: str | None) -> str | None:
    """Returns why `--quantization` is refused; None if it is not. found: the format of the checkpoint."""
    if requested in (None, "none") or FORMAT_ALIASES.get(str(requested), requested) == found:
        return None
    what = f"is quantized with {found}" if found else "is not quantized"
    return (
        f"--quantization {requested}: the checkpoint {what}; leave the flag out, or make a quantized checkpoint with "
        "`pagewire quantize`"
    )


def of_experts(architecture: str) -> str:
    """Returns why a model without experts refuses `--enable-expert-parallel`."""
    return (
        f"--enable-expert-parallel: {architecture} has no experts; leave it out, --tensor-parallel-size alone divides "
        "its layers"
    )


def of_copy(bits: int) -> str:
    """Returns why a model refuses `--spec-model self:q4`, or another number of bits."""
    return (
        f"--spec-model self:q{bits}: the weights have {bits} bits or less already, so a copy would be no faster than "
        "the model; use --spec-method ngram, or serve the model with --quantization none"
    )


def of_length(length: int, longest: int) -> str:
    """Returns why `--max-model-len` is refused."""
    return f"--max-model-len {length} exceeds the model's {longest} positions; lower it"
