"""A mixture of experts on a CPU: our products beside a loop over experts in torch, as transformers has it.

    python -m benchmarks.experts_cpu                     # experts of Qwen3-30B-A3B, OLMoE-1B-7B and Mixtral's form
    python -m benchmarks.experts_cpu --tokens 32 --forms bf16

Both take the same tokens, experts and weights of the experts' outputs; the loop multiplies 4-bit weights dequantized
to bf16 beforehand. Times are the smallest of several rounds, in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels import ops
from pagewire.kernels.cpu.packed_linear import pack as pack_dense
from pagewire.kernels.quantized import GroupedWeight, pack, stack
from pagewire.services.executor.layers.experts import ExpertsWeight
from pagewire.services.executor.layers.weights import Dense, PackedDense

# name -> (experts, experts per token, hidden size, intermediate size of an expert)
MODELS = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "olmoe-1b-7b": (64, 8, 2048, 1024),
    "mixtral, a quarter as wide": (8, 2, 1024, 3584),
}
GROUP = 128


@dataclass(frozen=True)
class Layer:
    """Experts twice: ours, and dense [E, N, K] for the loop."""

    gate_up: ExpertsWeight
    down: ExpertsWeight
    dense_gate_up: Tensor
    dense_down: Tensor
    top_k: int

    def ours(self, hidden: Tensor, logits: Tensor) -> Tensor:
        ids, weights = ops.route_experts(logits, None, self.top_k, "softmax", True, 1.0, 1, 1, 1)
        order, starts = ops.sort_by_expert(ids, logits.shape[1])
        inner = self.gate_up.multiply_experts(hidden, None, order, starts, gated=True)
        return ops.combine_experts(self.down.multiply_experts(inner, None, order, starts, gated=False), weights)

    def loop(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """transformers 5, `Qwen3MoeExperts.forward`, but without one_hot"""
        weights, ids = logits.softmax(dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(hidden)
        for expert in ids.unique().tolist():
            tokens, choice = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(hidden[tokens], self.dense_gate_up[expert]).chunk(2, dim=-1)
            result = F.linear(F.silu(gate) * up, self.dense_down[expert]) * weights[tokens, choice, None]
            out.index_add_(0, tokens, result.to(out.dtype))
        return out


def layer(form: str, num_experts: int, top_k: int, hidden_size: int, size: int) -> Layer:
    ours: list[ExpertsWeight] = []
    dense: list[Tensor] = []
    for outputs, inputs in ((2 * size, hidden_size), (hidden_size, size)):
        weight, numbers = _weight(form, num_experts, outputs, inputs)
        ours.append(weight)
        dense.append(numbers.view(num_experts, outputs, inputs))
    return Layer(ours[0], ours[1], dense[0], dense[1], top_k)


def _weight(form: str, num_experts: int, outputs: int, inputs: int) -> tuple[ExpertsWeight, Tensor]:
    shape = (num_experts * outputs, inputs)
    if form == "4bit":
        parts = [
            GroupedWeight(
                torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8),
                4,
                GROUP,
                torch.full((outputs, inputs // GROUP), 0.004, dtype=torch.float16),
                zero_point=8,
            )
            for _ in range(num_experts)
        ]
        dense = torch.cat([part.dequantize().bfloat16() for part in parts])
        packed = pack(stack(parts))
        assert isinstance(packed, ExpertsWeight)
        return packed, dense
    dense = torch.empty(shape, dtype=torch.float32 if form == "fp32" else torch.bfloat16).normal_(0, 0.02)
    return (Dense(dense), dense) if form == "fp32" else (PackedDense(shape, pack_dense(dense.clone())), dense)


def in_turns(functions: Sequence[Callable[[], Tensor]], rounds: int) -> list[float]:
    """Smallest seconds of each."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            own.append(time.perf_counter() - start)
    return [min(own) for own in times]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,8,32,128")
    parser.add_argument("--forms", default="fp32,bf16,4bit")
    parser.add_argument("--models", default=",".join(name.split(",")[0] for name in MODELS))
    parser.add_argument("--experts", type=int, help="fewer experts than the model has")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print("| experts | form | tokens | loop, ms | ours, ms | ratio | difference |")
    print("| --- " * 7 + "|")
    for name, (num_experts, top_k, hidden_size, size) in MODELS.items():
        if name.split(",")[0] not in arguments.models.split(","):
            continue
        num_experts = arguments.experts or num_experts
        for form in arguments.forms.split(","):
            torch.manual_seed(0)
            experts = layer(form, num_experts, top_k, hidden_size, size)
            for num_tokens in map(int, arguments.tokens.split(",")):
                dtype = experts.dense_down.dtype
                hidden, logits = torch.randn(num_tokens, hidden_size).to(dtype), torch.randn(num_tokens, num_experts)
                functions = [partial(experts.loop, hidden, logits), partial(experts.ours, hidden, logits)]
                expected, actual = (function().float() for function in functions)
                loop, ours = in_turns(functions, arguments.rounds)
                difference = (actual - expected).norm() / expected.norm()
                print(
                    f"| {name} | {form} | {num_tokens} | {1e3 * loop:.2f} | {1e3 * ours:.2f} | {loop / ours:.1f} "
                    f"| {difference:.1e} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
