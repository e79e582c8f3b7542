"""Tuning: its parts against autograd, and what it makes of tiny models."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagewire.errors import StartupError
from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.quantize import progress
from pagewire.quantize.config import QuantizeConfig
from pagewire.quantize.model.student import TunedVector, TunedWeight
from pagewire.quantize.model.texts import bundled_documents, held_out, sequences
from pagewire.quantize.training import training, tune, tune_layer
from pagewire.quantize.training.distillation import Divergence
from pagewire.quantize.training.training import batches
from tests.quantize.test_quantize import decoded_state, perplexity, quantize, save_model
from tests.quantize.test_quantize_layouts import random_weight

STEPS = 25
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "awq": ("llama biased", {"method": "awq"}),
    "gptq": ("qwen3", {"method": "gptq", "static_groups": False}),
    "gptq symmetric": ("mistral window", {"method": "gptq", "sym": True, "group_size": -1}),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(bundled_documents()[0])
    return path


def divergence(original: PreTrainedModel, state: dict[str, Tensor], tokens: Tensor) -> float:
    """KL(original || a model with these weights) per token, without each sequence's first; changes the original."""

    @torch.inference_mode()
    def predictions() -> Tensor:
        return original(tokens).logits[:, 1:].float().log_softmax(-1).flatten(0, 1)

    expected = predictions()
    original.load_state_dict(state, strict=False)
    return F.kl_div(predictions(), expected, log_target=True, reduction="batchmean").item()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.few("gptq")
def test_predictions_come_closer(tmp_path: Path, text: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, options = METHODS[method]
    monkeypatch.setattr(tune, "RATE", 2e-3)
    original = save_model(tmp_path / "model", family)
    before = quantize(tmp_path / "model", tmp_path / "before", text, **options)
    after = quantize(tmp_path / "model", tmp_path / "after", text, **options, tune_steps=STEPS)
    assert before["tuning"] is None
    assert after["tuning"]["steps"] == STEPS
    assert after["tuning"]["perplexity_before_tuning"] == before["perplexity_after"]
    tokens, held = held_out(load_tokenizer(tmp_path / "model").encode(text.read_text(), add_special_tokens=False))
    calibration = sequences(tokens, 12, 32, "text")
    found = {}
    for out in ("before", "after"):
        state = decoded_state(tmp_path / out)
        found[out] = divergence(original, state, calibration)
        original = save_model(tmp_path / "model", family)
    assert found["after"] < 0.85 * found["before"]
    assert after["tuning"]["divergence_last_step"] == pytest.approx(found["after"], rel=0.1)
    assert after["tuning"]["divergence_first_step"] == pytest.approx(found["before"], rel=0.2)
    original.load_state_dict(state, strict=False)
    assert after["perplexity_after"] == pytest.approx(perplexity(original, sequences(held, 4, 32, "text")), rel=0.01)
    assert_only_trained(load_file(tmp_path / "before/model.safetensors"), tmp_path / "after")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.few("awq", "gptq symmetric")
def test_layers_come_closer(tmp_path: Path, text: Path, method: str) -> None:
    family, options = METHODS[method]
    original = save_model(tmp_path / "model", family)
    before = quantize(tmp_path / "model", tmp_path / "before", text, **options)
    after = quantize(tmp_path / "model", tmp_path / "after", text, **options, tune_layer_steps=STEPS)
    assert not before["layer_errors"]
    assert len(after["layer_errors"]) == 2
    assert all(last < 0.95 * first for first, last in after["layer_errors"])
    tokens, held = held_out(load_tokenizer(tmp_path / "model").encode(text.read_text(), add_special_tokens=False))
    calibration = sequences(tokens, 12, 32, "text")
    found = {}
    for out in ("before", "after"):
        state = decoded_state(tmp_path / out)
        found[out] = divergence(original, state, calibration)
        original = save_model(tmp_path / "model", family)
    assert found["after"] < 0.9 * found["before"]
    original.load_state_dict(state, strict=False)
    assert after["perplexity_after"] == pytest.approx(perplexity(original, sequences(held, 4, 32, "text")), rel=0.01)
    assert_only_trained(load_file(tmp_path / "before/model.safetensors"), tmp_path / "after", layers=True)


def assert_only_trained(before: dict[str, Tensor], out: Path, *, layers: bool = False) -> None:
    """Checks that nothing but what is trained has changed. layers: they are trained, codes too, and the second
    depends on the first."""
    after = load_file(out / "model.safetensors")
    assert list(after) == list(before)
    for name, tensor in after.items():
        kind = name.rpartition(".")[2]
        trained = kind in ("scales", "bias") or "norm" in name
        if layers:
            trained = (trained or kind == "qweight") and ".layers." in name
            if ".layers.1." in name:
                continue
        assert torch.equal(tensor, before[name]) != trained, name
        assert (tensor.dtype, tensor.shape) == (before[name].dtype, before[name].shape)
        assert not tensor.is_floating_point() or tensor.isfinite().all()


@pytest.mark.parametrize("num_tokens", [1, 300])
def test_divergence_and_gradient(num_tokens: int) -> None:
    torch.manual_seed(0)
    head, original = torch.randn(50, 24), torch.randn(num_tokens, 24)
    student = (original + 0.2 * torch.randn(num_tokens, 24)).requires_grad_()
    logits = (student @ head.T).log_softmax(-1)
    expected = F.kl_div(logits, (original @ head.T).log_softmax(-1), log_target=True, reduction="sum")
    (expected_gradient,) = torch.autograd.grad(expected, student)
    found, gradient = Divergence(head)(original, student.detach())
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-4)
    assert Divergence(head)(original, original)[0].item() == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(("bits", "symmetric", "permuted"), [(4, False, True), (8, True, False), (8, False, True)])
def test_weight_and_gradient_of_its_scales(bits: int, symmetric: bool, permuted: bool) -> None:
    weight = random_weight(16, 56, 32, bits, 0, symmetric=symmetric, permuted=permuted)
    parameter = nn.Parameter(torch.empty(weight.shape))
    tuned = TunedWeight(weight, parameter)
    assert torch.equal(parameter.data, weight.dequantize())
    parameter.grad = torch.randn(weight.shape)
    gradient = parameter.grad.clone()
    tuned.take_gradient()
    # Forward difference: the weight is linear in the change.
    expected = torch.empty_like(tuned.change)
    for group in range(expected.shape[1]):
        scales = weight.scales.float()
        scales[:, group] *= 2
        moved = random_weight(16, 56, 32, bits, 0, symmetric=symmetric, permuted=permuted)
        object.__setattr__(moved, "scales", scales)
        expected[:, group] = ((moved.dequantize() - weight.dequantize()) * gradient).sum(dim=1)
    torch.testing.assert_close(tuned.change.grad, expected, rtol=1e-3, atol=1e-2)
    tuned.change += 0.01 * torch.randn(tuned.change.shape)
    tuned.put()
    assert torch.equal(parameter.grad, gradient)
    value = tuned.value()
    assert torch.equal(value.codes, weight.codes)
    assert value.scales.dtype is torch.float16
    assert torch.equal(parameter.data, value.dequantize())


@pytest.mark.parametrize("permuted", [False, True])
def test_codes_follow_their_positions(permuted: bool) -> None:
    weight = random_weight(16, 56, 32, 4, 0, symmetric=False, permuted=permuted)
    parameter = nn.Parameter(torch.empty(weight.shape))
    positions = weight.codes + torch.rand(weight.shape) * 0.8 - 0.4
    tuned = TunedWeight(weight, parameter, positions)
    assert torch.equal(tuned.value().codes, weight.codes)
    assert tuned.positions is not None
    tuned.positions += 1
    tuned.put()
    codes = (weight.codes + 1).clamp(max=15)
    assert torch.equal(tuned.value().codes, codes)
    assert torch.equal(parameter.data, tuned.value().dequantize())
    parameter.grad = torch.randn(weight.shape)
    tuned.take_gradient()
    # The weight is linear in the codes: one more of each is one more scale.
    step = (replace(weight, codes=weight.codes + 1).dequantize() - weight.dequantize()) * parameter.grad
    expected = step if weight.permutation is None else step[:, weight.permutation.long()]
    beyond = tuned.positions > 15.5
    assert 0 < beyond.sum() < beyond.numel()
    torch.testing.assert_close(tuned.positions.grad, expected.masked_fill(beyond, 0), rtol=1e-3, atol=1e-5)


def test_scales_neither_vanish_nor_overflow() -> None:
    weight = random_weight(8, 32, 32, 4, 0, symmetric=True, permuted=False)
    object.__setattr__(weight, "scales", torch.full_like(weight.scales, 60000.0))
    tuned = TunedWeight(weight, nn.Parameter(torch.empty(weight.shape)))
    tuned.change.fill_(3.0)
    tuned.put()
    assert torch.equal(tuned.value().scales, torch.full_like(weight.scales, torch.finfo(torch.float16).max))
    tuned.change.fill_(-3.0)
    tuned.put()
    assert torch.equal(tuned.value().scales, torch.full_like(weight.scales, 30000.0))


def test_vector_and_gradient() -> None:
    start = torch.tensor([2.0, -1.0, 0.0])
    parameter = nn.Parameter(torch.empty(3))
    tuned = TunedVector(start, parameter)
    assert torch.equal(parameter.data, start)
    parameter.grad = torch.ones(3)
    tuned.take_gradient()
    assert tuned.change.grad is not None
    torch.testing.assert_close(tuned.change.grad[:2], torch.tensor([2.0, 1.0]))
    tuned.change += 0.1
    tuned.put()
    torch.testing.assert_close(tuned.value()[:2], torch.tensor([2.2, -0.9]))
    assert 0 < tuned.value()[2] < 1e-3  # what was zero moves too


def test_each_sequence_is_seen_before_any_is_seen_again() -> None:
    picks = torch.cat(list(itertools.islice(batches(10, 4), 5)))
    for epoch in picks.split(10):
        assert sorted(epoch.tolist()) == list(range(10))
    assert picks[:10].tolist() != picks[10:].tolist()
    assert sorted(next(batches(3, 8)).tolist()) == [0, 1, 2]


def test_memory_decides_without_an_option(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(tmp_path / "model")
    for module in (tune, tune_layer):
        monkeypatch.setattr(module, "STEPS", 2)
    unset = {"tune_steps": None, "tune_layer_steps": None}
    report = quantize(tmp_path / "model", tmp_path / "auto", text, **unset)
    assert report["tuning"]["steps"] == 2
    assert len(report["layer_errors"]) == 2
    monkeypatch.setattr(training, "available_bytes", lambda device: 1_000_000)
    report = quantize(tmp_path / "model", tmp_path / "small", text, **unset)
    assert report["tuning"] is None
    assert not report["layer_errors"]
    assert "not tuning the whole model, which takes about" in caplog.text
    assert "tune anyway with --tune-steps 2" in caplog.text
    assert "not tuning layers, which takes about" in caplog.text
    assert "tune anyway with --tune-layer-steps 2" in caplog.text
    report = quantize(tmp_path / "model", tmp_path / "told", text, tune_steps=1, tune_layer_steps=1)
    assert report["tuning"]["steps"] == 1
    assert len(report["layer_errors"]) == 2


@pytest.mark.parametrize("options", [{"method": "rtn"}, {"method": "gptq", "bits": 8}])
def test_what_is_not_tuned_by_default(tmp_path: Path, text: Path, options: dict[str, Any]) -> None:
    save_model(tmp_path / "model")
    options |= {"tune_steps": None, "tune_layer_steps": None}
    report = quantize(tmp_path / "model", tmp_path / "out", text, **options)
    assert report["tuning"] is None
    assert not report["layer_errors"]


def test_breakdown_leaves_nothing(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "model")
    monkeypatch.setattr(tune, "RATE", float("inf"))
    with pytest.raises(StartupError, match=r"tuning broke down at step 2.*--tune-steps 0"):
        quantize(tmp_path / "model", tmp_path / "out", text, tune_steps=3)
    monkeypatch.setattr(tune_layer, "RATE", float("inf"))
    with pytest.raises(StartupError, match=r"tuning a layer broke down at step 2.*--tune-layer-steps 0"):
        quantize(tmp_path / "model", tmp_path / "out", text, tune_layer_steps=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_interruption_leaves_nothing(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    save_model(tmp_path / "model")
    monkeypatch.setattr(progress.Progress, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize(tmp_path / "model", tmp_path / "out", text, tune_steps=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_default_is_what_the_help_says() -> None:
    config = QuantizeConfig()
    assert config.tune_steps is config.tune_layer_steps is None
    fields = QuantizeConfig.__dataclass_fields__
    assert f"default: {tune.STEPS} " in fields["tune_steps"].metadata["help"]
    assert f"default: {tune_layer.STEPS} " in fields["tune_layer_steps"].metadata["help"]
