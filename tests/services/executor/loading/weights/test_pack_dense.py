"""Dense bf16 weights of a model on a CPU are packed when they are loaded; the model stays the same."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagewire.kernels.cpu.layouts import packed_layout
from pagewire.kernels.cpu.products import packed_linear
from pagewire.services.executor.layers.weights import Dense, PackedDense, PackedGrouped
from pagewire.services.executor.loading import load_own
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.loading.weights.pack_dense import pack_dense, packs_dense
from pagewire.services.executor.models.decoder import DecoderModel
from tests.services.executor.helpers.paged_batch import PagedBatch
from tests.services.executor.loading.dense_weights import dense_tensors, padding_bytes
from tests.services.executor.loading.weights.test_gguf import tiny_model
from tests.services.executor.loading.weights.test_gguf_quantized import LINEAR, MIXTURES, SIZES, write_quantized
from tests.services.executor.models.test_models import CPU, save_tiny

TOKENS = [1, 5, 9, 3, 60, 2]


@pytest.fixture(params=[False, True], ids=["bf16", "fixed point"])
def fixed_point(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Packs dense weights as on processors of either kind."""
    monkeypatch.setattr(packed_linear, "packs_fixed_point", lambda: request.param)
    return bool(request.param)


def load(path: Path, dtype: str = "bfloat16", **options: object) -> DecoderModel:
    model = load_model(path, dtype=dtype, device=CPU, **options)  # type: ignore[arg-type]
    assert isinstance(model, DecoderModel)
    return model


def unpacked(monkeypatch: pytest.MonkeyPatch, path: Path) -> DecoderModel:
    with monkeypatch.context() as patch:
        patch.setattr(load_own, "packs_dense", lambda dtype, device: False)
        return load(path)


@torch.inference_mode()
def logits(model: DecoderModel) -> Tensor:
    """Returns the logits of a prompt, then of one more token."""
    batch = PagedBatch(model, num_requests=1, max_len=16)
    return torch.cat([batch.step({0: TOKENS})[0], batch.step({0: [7]})[0]]).float()


def assert_exact(path: Path, model: DecoderModel) -> None:
    """Compares the logits with those of the weights in fp32."""
    expected = logits(load(path, "float32"))
    error = (logits(model) - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.016  # nearly all of it is that of the weights


def kinds(model: DecoderModel) -> list[type]:
    return [type(part) for module in model.modules() for part in module.parts]


@pytest.mark.parametrize("arch", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixed_point: bool, arch: str, tied: bool
) -> None:
    save_tiny(tmp_path, arch, tie_word_embeddings=tied)
    plain, model = unpacked(monkeypatch, tmp_path), load(tmp_path)
    assert set(kinds(plain)) == {Dense}
    first, *others = kinds(model)
    assert first is (PackedDense if tied else Dense), "rows that are only looked up stay rows"
    assert set(others) == {PackedDense}
    expected, actual = dense_tensors(plain), dense_tensors(model)
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        is_rounded = fixed_point and tensor.dim() == 2 and (tied or "embed" not in name)
        packed = packed_layout.pack(tensor, fixed_point=True) if is_rounded else None
        assert torch.equal(actual[name], tensor if packed is None else packed_layout.unpack(packed, *tensor.shape))
    assert model.weight_bytes == plain.weight_bytes + padding_bytes(model)
    assert_exact(tmp_path, model)


def test_dense_weights_beside_quantized_ones(tmp_path: Path) -> None:
    expected = tiny_model("Llama", **SIZES)
    quantized = {name: MIXTURES["Q4_K_M"][name] for name in MIXTURES["Q4_K_M"] if name in LINEAR}
    write_quantized(tmp_path / "tiny.gguf", expected, "llama", quantized)
    model = load(tmp_path / "tiny.gguf")
    assert isinstance(model.embed.weight, Dense)
    assert model.lm_head is not None and isinstance(model.lm_head.weight, PackedDense)
    assert PackedGrouped in kinds(model)
    assert_exact(tmp_path / "tiny.gguf", model)


def test_random_and_dequantized_weights_are_packed(tmp_path: Path) -> None:
    write_quantized(tmp_path / "tiny.gguf", tiny_model("Llama", **SIZES), "llama", MIXTURES["Q4_K_M"])
    for options in ({"quantization": "none"}, {"quantization": "none", "load_format": "dummy"}):
        assert kinds(load(tmp_path / "tiny.gguf", **options))[1:] == [PackedDense] * 5


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_stay_as_they_are(tmp_path: Path, dtype: str) -> None:
    save_tiny(tmp_path, "Llama")
    assert set(kinds(load(tmp_path, dtype))) == {Dense}


def test_only_cpus_pack() -> None:
    assert packs_dense(torch.bfloat16, CPU)
    assert not packs_dense(torch.bfloat16, torch.device("meta"))


def test_one_module_at_most_is_there_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixed_point: bool) -> None:
    """A module is there twice only if it has to be padded, or is put into fixed point: others are packed in place."""
    save_tiny(tmp_path, "Llama", hidden_size=64, num_attention_heads=4)
    model = unpacked(monkeypatch, tmp_path)
    before = [part.tensor for module in model.modules() for part in module.parts if isinstance(part, Dense)][1:]
    padded = [tensor.shape[0] % 16 > 0 or tensor.shape[1] % 32 > 0 for tensor in before]
    assert set(padded) == {True, False}
    copies = [True] * len(padded) if fixed_point else padded
    addresses = [tensor.data_ptr() for tensor in before]
    copied = [weakref.ref(tensor) for tensor, is_copied in zip(before, copies, strict=True) if is_copied]
    del before
    alive, pack = [], packed_linear.pack

    def noted(weight: Tensor, *, fixed_point: bool) -> Tensor:
        packed = pack(weight, fixed_point=fixed_point)
        if packed.data_ptr() != weight.data_ptr():
            alive.append(sum(tensor() is not None for tensor in copied))
        return packed

    monkeypatch.setattr(packed_linear, "pack", noted)
    pack_dense(model)
    assert alive == list(range(len(copied), 0, -1))
    assert not any(tensor() is not None for tensor in copied)
    if not fixed_point:
        packed = [part.tensor for module in model.modules() for part in module.parts if isinstance(part, PackedDense)]
        moved = [tensor.data_ptr() != address for tensor, address in zip(packed, addresses, strict=True)]
        assert moved == padded
