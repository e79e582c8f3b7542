"""Every form in which the products of few rows are compiled for what we serve."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.kernels.compiler import Specialization
from pagewire.kernels import tuning
from pagewire.kernels.triton.products import grouped_skinny, skinny

# Inputs of a linear layer: a multiple of every tile, and not.
EVEN_INPUTS, RAGGED_INPUTS = 4096, 4304
# With the norm of the stream or without, gated or not; split where tiles are too few to fill a GPU.
_ENDS: tuple[dict[str, Any], ...] = ({}, {"norm": True}, {"norm": True, "gated": True})
_ENDS_APART: tuple[dict[str, Any], ...] = ({}, {"gated": True})
# (bits as packed, group size, type of scales, form): GPTQ and AWQ, Q4_1, Q8_0
_WEIGHTS: tuple[tuple[int, int, str, dict[str, Any]], ...] = (
    (4, 128, "fp16", {"zero_point": 8}),
    (4, 128, "fp16", {"zeros": True}),
    (4, 32, "fp16", {"minimums": True}),
    (8, 32, "fp16", {"zero_point": 128}),
)


def skinny_forms(capability: int) -> Iterator[Specialization]:
    table = tuning.load_table("skinny_product", tuning.table_architecture("skinny_product", capability))
    for entry, split in itertools.product(table, (False, True)):
        num_tokens = max(skinny.MAX_ROWS, entry.shape["tokens"])
        for ends in _ENDS if num_tokens <= skinny.MAX_ROWS else _ENDS_APART:
            form = skinny.specialization("bf16", entry.config, **ends, num_tokens=num_tokens, split=split)
            yield Specialization(*form)
    most: dict[str, Any] = {"norm": True, "gated": True, "split": True, "bias": True}  # with what the others lack
    config = table[-1].config
    yield Specialization(*skinny.specialization("fp16", config, **most, num_inputs=RAGGED_INPUTS))
    yield Specialization(*skinny.specialization("bf16", config, **most, residual="fp32"))
    for (bits, group, scale_type, form), gated in itertools.product(_WEIGHTS, (False, True)):
        model = ("bf16", scale_type, bits, group, EVEN_INPUTS, _grouped_config(capability, bits, group))
        yield Specialization(*grouped_skinny.specialization(*model, **form, gated=gated))
    model = ("fp16", "fp16", 4, 128, RAGGED_INPUTS, _grouped_config(capability, 4, 128))
    yield Specialization(*grouped_skinny.specialization(*model, zeros=True, bias=True, gated=True))


def _grouped_config(capability: int, bits: int, group: int) -> Any:
    shape = {"bits": bits, "group": group, "tokens": 4, "outputs": 8192, "inputs": EVEN_INPUTS}
    return tuning.lookup("grouped_skinny", capability, **shape)
