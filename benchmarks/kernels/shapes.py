"""The shapes that kernels are tuned for: those of common models, and those that the tables list."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

from benchmarks.kernels.problems.expert_problems import expert_shapes
from benchmarks.kernels.problems.grouped_problems import grouped_shapes
from benchmarks.kernels.problems.linear_problems import linear_shapes
from benchmarks.kernels.problems.skinny_problems import skinny_shapes
from pagewire.kernels import tuning

Shape = Mapping[str, int]

MAX_KV_BYTES = 4 << 30
SKINNY = ("skinny_product", "grouped_skinny")
TINY_CONTEXT = 40

# Tokens of a request, query included, that decode attention is measured with.
_DECODE_CONTEXTS = (1024, 8192)


def _decode(*shape: int, **other: int) -> Iterator[Shape]:
    """`_attention`, with each of the contexts."""
    for context in _DECODE_CONTEXTS:
        yield {**_attention(*shape, **other), "context": context}


def _attention(head_dim: int, group: int, batch: int, query_len: int, block_size: int = 16, kv_bytes: int = 2) -> Shape:
    return {
        "head_dim": head_dim,
        "kv_bytes": kv_bytes,
        "block_size": block_size,
        "group": group,
        "batch": batch,
        "query_len": query_len,
    }


# Those of smoke tests: long enough that a GPU splits the contexts, so that partial results, counters and the merge are
# tested; in the interpreter, of TINY_CONTEXT.
_TINY: dict[str, list[Shape]] = {
    "decode_attention": [{**_attention(128, 4, 2, 1), "context": 2048}],
    "prefill_attention": [_attention(64, 2, 1, 20)],
}
# Llama 3.1 8B (32/8 heads of 128), Qwen2.5 7B (28/4 of 128) and 0.5B (14/2 of 64).
_SMALL: dict[str, list[Shape]] = {
    "decode_attention": [
        *(shape for batch in (1, 8, 64, 256) for shape in _decode(128, 4, batch, 1)),
        *(shape for batch in (1, 64) for shape in _decode(128, 7, batch, 1)),
        *(shape for batch in (1, 64) for shape in _decode(64, 7, batch, 1)),
        *(shape for batch in (1, 64) for shape in _decode(128, 4, batch, 1, kv_bytes=1)),
        *_decode(128, 4, 64, 1, block_size=64),
        *_decode(128, 4, 8, 8),
    ],
    "prefill_attention": [
        *(_attention(128, 4, 1, query_len) for query_len in (512, 1024, 4096)),
        _attention(128, 4, 8, 128),
        _attention(128, 4, 1, 4096, block_size=64),
        _attention(128, 4, 1, 4096, kv_bytes=1),
        _attention(64, 7, 1, 4096),
    ],
}
# Heads of SmolLM2 135M, Qwen2.5 0.5B, MHA of 64; Phi-3 (96); Llama, Qwen2.5 7B, 70B, MHA of 128; Gemma (256).
_HEADS = [(64, 3), (64, 7), (64, 1), (96, 1), (128, 4), (128, 7), (128, 8), (128, 16), (128, 1), (256, 2), (256, 8)]


def tuned_shapes(kernel: str, which: str, capability: int) -> list[Shape]:
    """`which`: tiny, small (some minutes) or all; the most important first."""
    if kernel in SKINNY:
        return list(skinny_shapes(kernel, which, capability))
    if kernel.startswith("grouped_"):
        return list(grouped_shapes(kernel, which, capability))
    if kernel == "experts":
        return list(expert_shapes(which, capability))
    if kernel not in CONTEXTS:
        return list(linear_shapes(kernel, which, capability))
    if which == "tiny":
        return _TINY[kernel]
    if which == "small":
        return _SMALL[kernel]
    lengths = [(1, 1), (16, 1), (64, 1), (256, 1), (8, 4), (8, 8)]
    if kernel == "prefill_attention":
        lengths = [(8, 64), (1, 512), (1, 1024), (1, 4096)]
    models = [
        shape
        for (head_dim, group), (batch, query_len) in itertools.product(_HEADS, lengths)
        for block_size, kv_bytes in ((16, 2), (64, 2), (16, 1))
        for shape in (
            _decode(head_dim, group, batch, query_len, block_size, kv_bytes)
            if kernel == "decode_attention"
            else [_attention(head_dim, group, batch, query_len, block_size, kv_bytes)]
        )
    ]
    table = tuning.load_table(kernel, tuning.table_architecture(kernel, capability))
    listed = [dict(entry.shape) for entry in table]
    distinct = {tuple(sorted(shape.items())): shape for shape in (*_SMALL[kernel], *models, *listed)}
    return list(distinct.values())


def _decode_contexts(shape: Shape) -> list[int]:
    token_bytes = 2 * 8 * shape["head_dim"] * shape["kv_bytes"] * shape["batch"]
    return [max(1, min(shape["context"], MAX_KV_BYTES // token_bytes) - shape["query_len"])]


# Tokens that are cached before the query: each shape is measured with every one of these.
CONTEXTS: dict[str, Callable[[Shape], list[int]]] = {
    "decode_attention": _decode_contexts,
    # The reference needs memory for all scores.
    "prefill_attention": lambda shape: [0, 8192] if shape["query_len"] <= 512 else [0],
}
