"""Flags that a model refuses, and the sentences for it: commands check them by the model's files before they start
anything, the executor while it loads the model."""

from collections.abc import Callable

# vLLM's further names of formats of quantized checkpoints.
FORMAT_ALIASES = {"awq_marlin": "awq", "gptq_marlin": "gptq"}
# Files in which early tools wrote what is now `quantization_config` in config.json.
FORMAT_FILES = {"awq": "quant_config.json", "gptq": "quantize_config.json"}
_MOST_RANKS = 64  # suggested in errors


def of_quantization(requested: str | None, found: str | None) -> str | None:
    """Returns why `--quantization` is refused; None if it is not. found: the format of the checkpoint."""
    if requested in (None, "none") or FORMAT_ALIASES.get(str(requested), requested) == found:
        return None
    what = f"is quantized with {found}" if found else "is not quantized"
    return (
        f"--quantization {requested}: the checkpoint {what}; leave the flag out, or make a quantized checkpoint with "
        "`pagewire quantize`"
    )


def of_heads(ranks: int, heads: int, kv_heads: int) -> str | None:
    """Returns why so many ranks cannot share these heads; None if they can."""

    def fits(size: int) -> bool:
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    if fits(ranks):
        return None
    return of_ranks(ranks, f"{heads} heads with {kv_heads} of keys and values cannot be split", fits)


def of_ranks(ranks: int, reason: str, fits: Callable[[int], bool]) -> str:
    """Returns the sentence for a number of ranks, which names the possible numbers. fits: whether one is possible."""
    others = [str(size) for size in range(1, _MOST_RANKS + 1) if fits(size)]
    return f"--tensor-parallel-size {ranks}: {reason}; possible are {', '.join(others)}"


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
