"""Rounding, GPTQ and AWQ on random weights and inputs that are correlated and unlike in size, as in a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagewire.errors import StartupError
from pagewire.kernels.quantized import GroupedWeight
from pagewire.quantize.rounding.activations import InputStatistics
from pagewire.quantize.rounding.awq import awq, input_scales
from pagewire.quantize.rounding.gptq import GptqOptions, gptq, inverse_factor
from pagewire.quantize.rounding.grid import Grid, clipped_scales, round_to_nearest, row_errors

NUM_OUTPUTS, NUM_INPUTS = 48, 160  # five groups of 32, or two of which the last is smaller


@pytest.fixture(scope="module")
def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(NUM_INPUTS, NUM_INPUTS, generator=generator) / NUM_INPUTS**0.5
    sizes = torch.exp(1.5 * torch.randn(NUM_INPUTS, generator=generator))
    return (torch.randn(2000, NUM_INPUTS, generator=generator) @ (mixing + torch.eye(NUM_INPUTS))) * sizes


@pytest.fixture(scope="module")
def weight() -> Tensor:
    return torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=torch.Generator().manual_seed(2)) * 0.05


@pytest.fixture(scope="module")
def statistics(inputs: Tensor) -> InputStatistics:
    found = InputStatistics(NUM_INPUTS, torch.device("cpu"))
    for part in inputs.split(300):
        found.add(part)
    return found


def output_error(quantized: GroupedWeight | Tensor, weight: Tensor, inputs: Tensor) -> float:
    values = quantized if isinstance(quantized, Tensor) else quantized.dequantize()
    return (inputs @ (values - weight).T).square().sum().item()


def grid(group_size: int = 32, bits: int = 4, *, symmetric: bool = False) -> Grid:
    return Grid(bits, group_size, symmetric, min_zero=1)


def test_statistics_are_those_of_all_inputs(inputs: Tensor, statistics: InputStatistics) -> None:
    torch.testing.assert_close(statistics.hessian, inputs.T @ inputs, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(statistics.magnitude, inputs.abs().mean(dim=0))


def test_bfloat16_inputs_lose_nothing(inputs: Tensor) -> None:
    rounded, found = inputs.bfloat16(), InputStatistics(NUM_INPUTS, torch.device("cpu"))
    found.add(rounded)
    exact = rounded.double().T @ rounded.double()
    assert ((found.hessian - exact).abs() / exact.diagonal().max()).max() < 1e-5


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_nearest_is_half_a_step_away(weight: Tensor, group_size: int, symmetric: bool) -> None:
    quantized = round_to_nearest(weight, grid(group_size, symmetric=symmetric)).weight
    size = NUM_INPUTS if group_size == -1 else group_size
    steps = quantized.flat_scales().repeat_interleave(size, dim=1)[:, :NUM_INPUTS]
    # The largest weight of a symmetric group, and the ends of a range with a rounded zero, are cut off by that much.
    assert ((quantized.dequantize() - weight).abs() <= steps * 1.01).all()
    assert ((quantized.dequantize() - weight).abs() <= steps * 0.51).float().mean() > 0.95


def test_zeros_stay_within_what_the_layout_holds() -> None:
    positive = torch.rand(8, 64) + 1.0
    quantized = round_to_nearest(positive, grid()).weight
    assert quantized.offsets is not None
    assert quantized.offsets.min() == 1


@pytest.mark.parametrize("value", [0.0, 1e-9])
def test_weights_near_zero(value: float) -> None:
    quantized = round_to_nearest(torch.full((8, 64), value), grid()).weight
    assert quantized.dequantize().abs().max() <= 1e-7


def test_weights_beyond_float16() -> None:
    with pytest.raises(StartupError, match="beyond float16's range"):
        round_to_nearest(torch.full((8, 64), 1e7), grid())


@pytest.mark.parametrize("symmetric", [False, True])
def test_clipping_helps(weight: Tensor, inputs: Tensor, statistics: InputStatistics, symmetric: bool) -> None:
    # Outliers that few inputs see: a range without them is finer for all others.
    weight = weight.clone()
    weight[:, statistics.magnitude.argsort()[:5]] *= 4
    whole = round_to_nearest(weight, grid(-1, symmetric=symmetric)).weight
    kept = clipped_scales(weight, statistics.hessian, grid(-1, symmetric=symmetric))
    clipped = kept.values(kept.codes(weight, grid(-1, symmetric=symmetric)))
    assert output_error(clipped, weight, inputs) < 0.7 * output_error(whole, weight, inputs)


@pytest.mark.parametrize(
    ("bits", "symmetric", "group_size"), [(4, False, 32), (4, True, 128), (4, False, -1), (8, True, 32)]
)
@pytest.mark.parametrize(("desc_act", "static_groups"), [(False, False), (True, True), (True, False)])
def test_gptq_beats_rounding(
    weight: Tensor,
    inputs: Tensor,
    statistics: InputStatistics,
    bits: int,
    symmetric: bool,
    group_size: int,
    desc_act: bool,
    static_groups: bool,
) -> None:
    chosen = grid(group_size, bits, symmetric=symmetric)
    options = GptqOptions(desc_act, static_groups, clip=False, damp=0.01)
    quantized = gptq(weight, statistics.hessian, chosen, options).weight
    assert (quantized.permutation is not None) == (desc_act and not static_groups)
    nearest = output_error(round_to_nearest(weight, chosen).weight, weight, inputs)
    assert output_error(quantized, weight, inputs) < 0.8 * nearest


def test_gptq_of_uncorrelated_inputs_is_rounding(weight: Tensor) -> None:
    options = GptqOptions(desc_act=False, static_groups=False, clip=False, damp=0.01)
    quantized = gptq(weight, torch.eye(NUM_INPUTS), grid(), options).weight
    assert torch.equal(quantized.dequantize(), round_to_nearest(weight, grid()).weight.dequantize())


def test_gptq_with_inputs_that_are_always_zero(weight: Tensor, inputs: Tensor) -> None:
    inputs = inputs.clone()
    inputs[:, :40] = 0
    quantized = gptq(weight, inputs.T @ inputs, grid(), GptqOptions()).weight
    assert quantized.dequantize().isfinite().all()
    assert output_error(quantized, weight, inputs) < output_error(
        round_to_nearest(weight, grid()).weight, weight, inputs
    )


def test_factor_is_that_of_the_inverse(statistics: InputStatistics) -> None:
    factor = inverse_factor(statistics.hessian, 0.01).double()
    damped = statistics.hessian.double()
    damped += 0.01 * damped.diagonal().mean() * torch.eye(NUM_INPUTS)
    torch.testing.assert_close(factor.T @ factor @ damped, torch.eye(NUM_INPUTS).double(), rtol=0, atol=1e-3)


def test_broken_statistics() -> None:
    with pytest.raises(StartupError, match="not finite"):
        inverse_factor(torch.full((4, 4), float("inf")), 0.01)
    with pytest.raises(StartupError, match="no usable statistics"):
        inverse_factor(torch.tensor([[1.0, 1e9], [1e9, 1.0]]), 0.01)


def test_awq_beats_rounding(weight: Tensor, inputs: Tensor, statistics: InputStatistics) -> None:
    chosen = grid(128)
    scales = input_scales(weight, statistics.hessian, statistics.magnitude, chosen)
    scaled_hessian = statistics.hessian / torch.outer(scales, scales)
    nearest = output_error(round_to_nearest(weight, chosen).weight, weight, inputs)
    scaled_nearest = output_error(
        round_to_nearest(weight * scales, chosen).weight.dequantize() / scales, weight, inputs
    )
    quantized = awq(weight * scales, scaled_hessian, chosen, GptqOptions(static_groups=False)).weight
    assert quantized.permutation is None  # the layout holds none
    made_up_for = output_error(quantized.dequantize() / scales, weight, inputs)
    assert made_up_for < 0.9 * scaled_nearest < 0.8 * nearest


def test_inputs_of_one_producer_get_one_scale(weight: Tensor, statistics: InputStatistics) -> None:
    producers = torch.arange(NUM_INPUTS) % 40
    scales = input_scales(weight, statistics.hessian, statistics.magnitude, grid(), producers)
    assert torch.equal(scales, scales[:40].repeat(4))
    assert scales.max() > scales.min()


def test_row_errors_are_those_of_the_outputs(weight: Tensor, inputs: Tensor) -> None:
    delta = weight * 0.01
    expected = (inputs @ delta.T).square().sum(dim=0)
    torch.testing.assert_close(row_errors(delta, inputs.T @ inputs)[:, 0], expected, rtol=1e-3, atol=0)
