"""Adapters (LoRA): small weights that are added to those of a layer, each token's own."""

from __future__ import annotations

from torch import Tensor

from pagewire.kernels.ops.definition import op


@op(mutates=("out",))
def add_adapters(
    out: Tensor, x: Tensor, down: Tensor, up: Tensor, slots: Tensor, starts: Tensor, ranks: Tensor
) -> None:
    """Adds the product of each token's adapter to a layer's outputs, in place.

    For a token t in slot s >= 0, and part p of the outputs, with all sums in fp32:
    out[t, o] += sum_r up[s, r, o] * (sum_i down[s, p, r, i] * x[t, i]), r < ranks[s, p], starts[p] <= o < starts[p + 1]

    out     [num_tokens, num_outputs]
    x       [num_tokens, num_inputs]: what the layer read, of any dtype
    down    [num_slots, num_parts, rank, num_inputs], contiguous
    up      [num_slots, rank, num_outputs] of down's dtype, contiguous; with the adapter's scale
    slots   int32 [num_tokens]: the slot of a token, -1 where it has no adapter, which costs nothing
    starts  int32 [num_parts + 1]: the outputs of each part, which has a down of its own (queries, keys and values are
            three parts of one product)
    ranks   int32 [num_slots, num_parts]: up to `rank`; what lies beyond is not read. 0: no product for this part

    A token's result does not depend on the other tokens.
    """
