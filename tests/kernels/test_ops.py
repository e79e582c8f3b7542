"""All ops as registered: their implementations, schemas and values."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from pagewire.kernels import ops, reference
from pagewire.kernels.channel import channel_bytes
from pagewire.kernels.cpu.layouts import packed_layout
from pagewire.kernels.ops import definition
from pagewire.kernels.peer_memory import PARTS, PEER_BYTES
from pagewire.kernels.quantized import GroupedWeight
from pagewire.kernels.quantized.packed import pack_grouped
from tests.kernels.batches import (
    EncoderBatch,
    StepRows,
    make_batch,
    make_heads,
    make_latent_batch,
    make_latents,
    make_step,
)
from tests.kernels.implementations import fallback
from tests.kernels.sampling_batches import (
    Row,
    SamplingBatch,
    drafted_rows,
    float_parameters,
    lookup_args,
    random_logits,
    suffix_args,
)
from tests.kernels.state_batches import StateBatch

# One unit in the last place, where C++ and torch round a different last bit of the fp32 value.
# The memory of a single rank
PEER = torch.zeros(PEER_BYTES, dtype=torch.uint8)


def channel() -> torch.Tensor:
    """Returns a channel of a single rank."""
    return torch.zeros(channel_bytes(1), dtype=torch.uint8)


def op_arguments() -> dict[str, tuple[Any, ...]]:
    batch = make_batch([1, 5], [20, 0], num_heads=4, num_kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32)
    x, weight = torch.randn(6, 64), torch.randn(64)
    heads = torch.randn(6, 4, 32), torch.randn(6, 2, 32)
    sampled = SamplingBatch(random_logits(2, 300), [Row(top_p=0.8, position=3), Row(temperature=0.0)])
    packed = pack_grouped(GroupedWeight(torch.randint(0, 16, (9, 64)).byte(), 4, 32, torch.rand(9, 2)), "cpu")
    codes, form = (packed.codes, packed.scales, None, None), (packed.bits, packed.group_size, packed.zero_point)
    dense = packed_layout.pack(torch.randint(-3, 4, (9, 70)).bfloat16())  # with sums that are exact
    gates = packed_layout.pack(torch.randint(-1, 2, (8, 70)).bfloat16() / 8)
    int8_weight = torch.randint(-128, 128, (9, 64), dtype=torch.int8)
    whole = torch.randint(-127, 128, (6, 64)).float()  # what 8 bits hold, if each group has the greatest
    whole[:, ::16] = 127.0
    states = StateBatch.of([(7, 3), (0, 9), (12, 1)], state_tokens=4)
    chosen = torch.randint(0, 3, (6, 2), dtype=torch.int32)  # of three experts with 16 outputs each
    pairs = reference.sort_by_expert(chosen, 3)
    experts = pack_grouped(GroupedWeight(torch.randint(0, 16, (48, 64)).byte(), 4, 32, torch.rand(48, 2)), "cpu")
    return {
        "add_adapters": (
            torch.randn(6, 40),
            x,
            torch.randn(2, 2, 8, 64),
            torch.randn(2, 8, 40),
            torch.tensor([0, -1, 1, 1, 0, -1], dtype=torch.int32),
            torch.tensor([0, 24, 40], dtype=torch.int32),
            torch.tensor([[8, 3], [0, 5]], dtype=torch.int32),
        ),
        "route_experts": (torch.randn(6, 16), torch.randn(16), 3, "sigmoid", True, 2.5, 4, 2, 2),
        "sort_by_expert": (chosen, 3),
        "experts_linear": (x, torch.randn(48, 64), torch.randn(48), *pairs, True),
        "packed_experts_linear": (
            torch.randint(-3, 4, (6, 70)).bfloat16(),
            packed_layout.pack(torch.randint(-3, 4, (48, 70)).bfloat16()),
            None,
            *pairs,
            48,
            False,
        ),
        "grouped_experts_linear": (x, experts.codes, experts.scales, None, None, None, *pairs, 48, 4, 32, 0, True),
        "fp8_experts_linear": (x, torch.randn(48, 64).to(torch.float8_e4m3fn), torch.rand(48), None, *pairs, False),
        "combine_experts": (torch.randn(12, 64), torch.rand(6, 2)),
        "paged_attention": batch.args(7, 20.0),
        "store_kv": (heads[1], heads[1] + 1, torch.zeros(3, 2, 2, 16, 32), torch.arange(6), None),
        "latent_attention": make_latent_batch([1, 5], [20, 0], 4, 32, 8, dtype=torch.float32).args(),
        "rotary_store_latent": make_latents(torch.float32, 6, 4, 32, 8).args(),
        "head_linear": (heads[0], torch.randn(4, 9, 32), torch.zeros(6, 4, 9)),
        "all_reduce": (x, channel(), 0, 1),
        "all_gather": (x, channel(), 0, 1),
        "all_to_all": (x, torch.zeros(0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), channel(), 0, 1),
        "broadcast": (x, 0, channel(), 0, 1),
        "peer_all_reduce": (x, torch.tensor([PEER.data_ptr()]), torch.zeros(PARTS, dtype=torch.int32), 0),
        "add_rms_norm": (x, x + 1, weight, 1e-5, None),
        "norm_add_rms_norm": (x, x + 1, weight + 1, weight, 1e-5, None),
        "rms_norm_": (x, weight, 1e-5),
        "layer_norm": (x, weight, weight + 1, 1e-5),
        "add_layer_norm": (x, x + 1, weight, None, 1e-5),
        "encoder_attention": EncoderBatch.of([5, 1], num_heads=4, num_kv_heads=2, head_dim=32).args(),
        "rotate": (torch.arange(6), torch.randn(6, 4, 32), torch.randn(6, 16)),
        "rotary_store_kv": make_heads(torch.float32, 6, norm=True, num_heads=4, num_kv_heads=2).args(),
        "causal_conv": states.conv_args(),
        "state_scan": states.scan_args(),
        "gated_rms_norm": (x, x + 1, weight, 1e-5, 32),
        "silu_and_mul": (x, None),
        "clamped_swiglu": (x, 1.702, 7.0),
        "gelu_tanh_and_mul": (x, None),
        "gelu": (x, None),
        "gelu_tanh": (x, None),
        "linear": (x, torch.randn(9, 64), None, None),
        "normed_linear": (x, x + 1, torch.zeros(6, 64), weight, 1e-5, torch.randn(10, 64), torch.randn(10), True),
        "normed_grouped_linear": (
            x,
            x + 1,
            torch.zeros(6, 64),
            weight,
            1e-5,
            *codes,
            None,
            None,
            9,
            *form,
            False,
        ),
        "grouped_linear": (x, *codes, None, None, 9, *form, None),
        "grouped_gated_linear": (x, *codes, None, None, 8, *form, True),
        "rough_grouped_linear": (whole, *codes[:-1], None, None, 9, *form),
        "grouped_embedding": (torch.tensor([3, 8, 0]), *codes, *packed.shape, *form, torch.float32),
        "packed_linear": (torch.randint(-3, 4, (6, 70)).bfloat16(), dense, None, 9, None),
        "packed_gated_linear": (torch.randint(-3, 4, (6, 70)).bfloat16(), gates, None, 8),
        "packed_embedding": (torch.tensor([3, 8, 0]), dense, 9, 70),
        "int8_linear": (x, int8_weight, torch.rand(9), None, None, False),
        "fp8_linear": (x, torch.randn(9, 64).to(torch.float8_e4m3fn), torch.rand(9), None, None, False),
        "step_inputs": (*make_step(StepRows(), [(3, 20), (-1, 2), (0, 1)]).values(), StepRows.BLOCK_SIZE),
        "sample_tokens": sampled.args(),
        "accept_tokens": drafted_rows([(3, 1, False), (1, 0, True), (2, 2, False)]).args(),
        "draft_by_suffix": suffix_args([[5, 7, 9, 2, 5, 7], [1], [3, 3, 4]], [3, 2, 1], [3, 3, 4, 8, -1, 3, 4, 9, -1]),
        "look_up_drafts": lookup_args([[5, 7, 9, 2, 5, 7], [1], [3, 3, 4]], [3, 2, 0]),
        "apply_penalties": (
            sampled.logits,
            torch.tensor([1, 0], dtype=torch.int32),  # batch indices
            torch.tensor([0, 2], dtype=torch.int32),  # rows
            float_parameters(3, repetition_penalty=1.5, presence_penalty=1.5, frequency_penalty=1.5),
            torch.randint(0, 300, (3, 20), dtype=torch.int32),
            torch.tensor([9, 0, 20]),
            torch.tensor([4, 0, 20]),
            None,  # offsets
        ),
        "mask_tokens": (
            sampled.logits.clone(),
            torch.tensor([1, 0], dtype=torch.int32),
            torch.tensor([[1, -1, *[0] * 7, -3], [-1, 0x5A5A5A5A, *[-2] * 7, 15]], dtype=torch.int32),
        ),
        "token_logprobs": (sampled.logits, torch.tensor([5, 299]), 3),
    }


def test_every_op_is_checked_as_registered() -> None:
    assert op_arguments().keys() == ops.DEFINITIONS.keys()


# Their references take a weight as numbers; what a CPU packs has none but the unpacked product.
WITHOUT_REFERENCE = {
    "grouped_linear",
    "grouped_gated_linear",
    "rough_grouped_linear",
    "grouped_embedding",
    "packed_linear",
    "packed_gated_linear",
    "packed_embedding",
    "grouped_experts_linear",
    "packed_experts_linear",
    "normed_grouped_linear",
}


def implementations(name: str) -> dict[str, Callable[..., Any]]:
    """Returns the implementations of an op, by backend."""
    backends = ["cpp", "torch"]
    if ops.DEFINITIONS[name].cuda and importlib.util.find_spec("triton"):
        backends.append("cuda")
    found = {backend: definition.implementation(name, backend) for backend in backends}
    return found if name in WITHOUT_REFERENCE else found | {"reference": getattr(reference, name)}


def test_an_op_without_an_implementation_says_where_to_define_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear_of_tomorrow(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    linear_of_tomorrow.__module__ = "pagewire.kernels.ops.products"
    monkeypatch.setattr(definition, "DEFINITIONS", dict(ops.DEFINITIONS))
    definition.op()(linear_of_tomorrow)
    with pytest.raises(NotImplementedError, match=r"define linear_of_tomorrow\(\) in kernels/reference/products"):
        torch.ops.pagewire.linear_of_tomorrow(torch.ones(1))
    with pytest.raises(
        NotImplementedError, match=r"no implementation for 'cuda': define .* in kernels/triton/products"
    ):
        definition.implementation("linear_of_tomorrow", "cuda")


def function_names(module: ModuleType) -> Iterator[str]:
    """Yields the names that the source of a module defines as functions, decorated or not."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    yield from (node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("package", [ops, reference])
def test_every_group_is_exported(package: ModuleType) -> None:
    for module in pkgutil.iter_modules(package.__path__):
        found = importlib.import_module(f"{package.__name__}.{module.name}")
        defined = set(function_names(found))
        assert module.name == "definition" or all(name.startswith("_") or hasattr(package, name) for name in defined)


def parameters(function: Callable[..., Any]) -> list[tuple[str, str, object]]:
    """Returns (name, type, default) of those that are given by position."""
    return [
        (parameter.name, str(parameter.annotation), parameter.default)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]


@pytest.mark.parametrize("name", list(ops.DEFINITIONS))
def test_implementations_have_the_parameters_of_the_definition(name: str) -> None:
    defined = parameters(ops.DEFINITIONS[name].function)
    # Torch hands on no argument that equals a default, so an implementation would have to know it, too.
    assert all(default is inspect.Parameter.empty for _, _, default in defined)
    for module, function in implementations(name).items():
        found = [(parameter, kind) for parameter, kind, _ in parameters(function)]
        assert found == [(parameter, kind) for parameter, kind, _ in defined], f"{name} of {module} differs"


def without_nan(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num() if x.is_floating_point() and x.itemsize > 1 else x


def comparable(*values: object) -> list[torch.Tensor]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [x.float() if x.dtype is torch.float8_e4m3fn else x for x in tensors]


@pytest.mark.parametrize("name", list(op_arguments()))
def test_registered_op_is_the_reference(name: str) -> None:
    assert ops.cpu_backend() == "cpp"
    actual_args, expected_args = op_arguments()[name], op_arguments()[name]
    for actual, expected in zip(actual_args, expected_args, strict=True):
        if isinstance(actual, torch.Tensor):
            actual.copy_(without_nan(expected))
            expected.copy_(actual)
    result = getattr(ops, name)(*actual_args)
    truth = getattr(fallback if name in WITHOUT_REFERENCE else reference, name)(*expected_args)
    if name == "rotary_store_kv":  # what the key heads hold afterwards is undefined
        actual_args[1][:, -4:], expected_args[1][:, -4:] = 0, 0
    truths = comparable(truth, *expected_args)
    largest = max((x.abs().max().item() for x in truths if x.is_floating_point() and x.numel()), default=0.0)
    torch.testing.assert_close(
        comparable(result, *actual_args),
        truths,
        atol=5e-5 + 1e-6 * largest,  # sums in another order, and their parts may cancel
        rtol=5e-5,
    )


@pytest.mark.parametrize("name", list(op_arguments()))
def test_fake_implementation_and_mutation_schema(name: str) -> None:
    """Right shapes without data, and no argument changed that the schema does not name (torch's own checker)."""
    arguments = tuple(without_nan(a) if isinstance(a, torch.Tensor) else a for a in op_arguments()[name])
    torch.library.opcheck(
        getattr(ops, name),
        arguments,
        # The schema check compares arguments before and after, which torch cannot do with fp8.
        test_utils=("test_faketensor",) if name.startswith("fp8_") else ("test_schema", "test_faketensor"),
    )
