"""A mixture of experts: which experts a token goes to, products of each token with its own experts' weights, their sum.

T tokens choose k of E experts each: P = T * k pairs, pair t * k + j being token t with its expert number j. The weights
of all experts are one weight of E * N outputs, of which [e * N, (e + 1) * N) are expert e's; its bias is [E * N].

`order` and `starts` (of `sort_by_expert`) say which pairs are an expert's, so that its weights are read once. They stay
on the device: nothing here waits for the host, and shapes follow from T and k alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.ops.definition import op


@op()
def route_experts(
    logits: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    scoring: str,
    normalize: bool,
    scale: float,
    num_groups: int,
    topk_groups: int,
    group_best: int,
) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and what their outputs count.

    logits           [T, E], E a multiple of num_groups
    correction_bias  fp32 [E]: added to scores when experts are chosen, not to weights
    scoring          "softmax" or "sigmoid": scores are that of all logits; "softmax_of_chosen": scores are the logits,
                     and weights the softmax of those chosen
    normalize        a token's weights sum to 1, before scale multiplies them
    num_groups       neighbouring experts form groups, of which only the topk_groups best are eligible; a group is as
                     good as the sum of its group_best best experts. One group: all are eligible
    returns          ids int32 [T, k], weights fp32 [T, k]; of equal scores the first expert is taken
    """
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


@op()
def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sorts the pairs of tokens and experts by expert: ids int32 [T, k] -> order int32 [P], starts int32 [E + 1].

    order[starts[e] : starts[e + 1]] are expert e's pairs, ascending.
    """
    return ids.new_empty(ids.numel()), ids.new_empty(num_experts + 1)


# In all products: x [T, K], a token's row for each of its pairs, or [P, K], a row per pair; the result [P, N] in x's
# dtype. Pair p with expert e: x[p * len(x) // P] @ weight[e * N : (e + 1) * N].T + bias[e * N : (e + 1) * N]; gated:
# `silu_and_mul` of that, [P, N / 2], which a device may round once.
@op()
def experts_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor, gated: bool
) -> Tensor:
    """Multiplies each pair's token by the weight of its expert; weight [E * N, K] in x's dtype."""
    return _of_pairs(x, order, starts, weight.shape[0], gated)


@op(cuda=False)
def packed_experts_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor, out_features: int, gated: bool
) -> Tensor:
    """Computes `experts_linear` of a bf16 weight in a CPU's layout; out_features: E * N, N a multiple of 16."""
    return _of_pairs(x, order, starts, out_features, gated)


# codes .. codebook and bits .. zero_point are those of a `quantized.PackedGrouped`.
@op()
def grouped_experts_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    codebook: Tensor | None,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    out_features: int,
    bits: int,
    group_size: int,
    zero_point: int,
    gated: bool,
) -> Tensor:
    """Computes `experts_linear` of a weight quantized in groups; out_features: E * N, N a multiple of the layout's
    tile."""
    return _of_pairs(x, order, starts, out_features, gated)


@op()
def fp8_experts_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor, gated: bool
) -> Tensor:
    """Computes `experts_linear` of an `Fp8Weight`; its scales are per output, or per block with N a multiple of 128.

    A device may quantize activations, as `fp8_linear` does, where experts have many pairs.
    """
    return _of_pairs(x, order, starts, weight.shape[0], gated)


@op()
def combine_experts(y: Tensor, weights: Tensor) -> Tensor:
    """Sums the pairs of each token, weighted, in fp32: y [P, N], weights fp32 [T, k] -> [T, N].

    A pair with weight 0 is not read: products may have skipped it.
    """
    return y.new_empty((weights.shape[0], y.shape[1]))


def _of_pairs(x: Tensor, order: Tensor, starts: Tensor, out_features: int, gated: bool) -> Tensor:
    return x.new_empty((order.shape[0], out_features // (starts.shape[0] - 1) // (2 if gated else 1)))
