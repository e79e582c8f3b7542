"""Products with quantized weights beside those with bf16 ones: `python -m benchmarks.quantized_cpu [FORMAT ...]`.

For every format a row per shape: how many times as fast as bf16 by number of tokens, more than 1 where the format wins.
Both take their turns within one loop over weights that are not in the caches, and the best round counts. Formats are
random ones of the checkpoint's own kind, packed as they are for serving.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from benchmarks.kernels_cpu import COLD_BYTES, MOST_WORK, best_times, for_each
from pagewire.kernels.cpu import native, packed_linear
from pagewire.kernels.quantized import PackedWeight, QuantizedWeight, pack
from pagewire.services.executor.loading.quantization.awq import GemmFormat
from pagewire.services.executor.loading.quantization.bitsandbytes import EightBitFormat, FourBitFormat
from pagewire.services.executor.loading.quantization.eight_bit import Fp8Format, Int8Format
from pagewire.services.executor.loading.quantization.gguf import GgufFormat
from pagewire.services.executor.loading.quantization.gguf_blocks import FORMS
from pagewire.services.executor.loading.quantization.gptq import GptqFormat

NUM_TOKENS = (1, 4, 8, 16, 32, 64, 256)
SHAPES = ((768, 3072), (4096, 4096))  # (outputs, inputs); all formats' groups and blocks divide them

RandomWeight = Callable[[int, int, torch.Generator], QuantizedWeight]
FORMATS: dict[str, RandomWeight] = {
    **{type_.name: GgufFormat(type_).random for type_ in (Type(value) for value in sorted(FORMS))},
    "AWQ g128": GemmFormat(128, True).random,
    "GPTQ g128": GptqFormat(4, 128, True, False, True).random,
    "GPTQ g32": GptqFormat(4, 32, True, False, True).random,
    "GPTQ g128, act-order": GptqFormat(4, 128, True, True, True).random,
    "GPTQ 8 bits": GptqFormat(8, 128, True, False, True).random,
    "W8A8": Int8Format().random,
    "bitsandbytes nf4": FourBitFormat("nf4").random,
    "bitsandbytes int8": EightBitFormat().random,
    "FP8, outputs": Fp8Format(blocks=False).random,
    "FP8, blocks": Fp8Format(blocks=True).random,
}


def speedups(random: RandomWeight, shape: tuple[int, int]) -> dict[int, float]:
    """Number of tokens -> time with packed bf16 weights / time with the format's."""
    num_outputs, num_inputs = shape
    copies = max(2, COLD_BYTES // (2 * num_inputs * num_outputs))
    weights = [pack(random(*shape, torch.Generator().manual_seed(seed))) for seed in range(copies)]
    dense = [packed_linear.pack(torch.randn(shape).bfloat16()) for _ in range(copies)]
    result = {}
    for num_tokens in NUM_TOKENS:
        calls = max(2, min(copies, MOST_WORK // (num_tokens * num_inputs * num_outputs)))
        times = best_times(contenders(weights[:calls], dense[:calls], num_tokens, shape), calls)
        result[num_tokens] = times["bf16"] / times["quantized"]
    return result


def contenders(
    weights: list[PackedWeight], dense: list[Tensor], num_tokens: int, shape: tuple[int, int]
) -> dict[str, Callable[[], None]]:
    x = torch.randn(num_tokens, shape[1]).bfloat16()
    return {
        "quantized": for_each(weights, lambda weight: weight(x, None)),
        "bf16": for_each(dense, lambda weight: native.packed_linear(x, weight, None, shape[0])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Products with quantized weights beside those with bf16 ones")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json-out", type=Path, help="write the factors there, too")
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"of {', '.join(FORMATS)}; all by default")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.formats if name not in FORMATS]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(FORMATS)}")
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads; times as fast as packed bf16 weights, by tokens\n")
    print("| format | weight [N, K] |" + "".join(f" {number} |" for number in NUM_TOKENS))
    print("|---|---|" + "---|" * len(NUM_TOKENS))
    factors: dict[str, dict[str, dict[int, float]]] = {}
    for name in arguments.formats or FORMATS:
        for shape in SHAPES:
            row = speedups(FORMATS[name], shape)
            factors.setdefault(name, {})[f"{shape[0]} x {shape[1]}"] = row
            cells = "".join(f" {factor:.2f} |" for factor in row.values())
            print(f"| {name} | {shape[0]} x {shape[1]} |{cells}", flush=True)
    if arguments.json_out:
        arguments.json_out.write_text(json.dumps(factors, indent=1))


if __name__ == "__main__":
    main()
