"""Quantized models from checkpoint to layers: what is read, stacked, dequantized, counted, and refused."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from pagewire.kernels import backends
from pagewire.kernels.quantized import BITS, Fp8Weight, GroupedWeight, Int8Weight, QuantizedWeight, packed
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.device import memory
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.weight_format import Part, TensorSpec
from pagewire.services.executor.layers.weights import Dense, Shard
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.loading.quantization import dequantize, install
from pagewire.services.executor.loading.quantization.dequantize import dequantize_into
from pagewire.services.executor.loading.quantization.install import install_jobs, num_weights, read_shard
from pagewire.services.executor.loading.weights.jobs import run_jobs
from pagewire.services.executor.loading.weights.safetensors import SafetensorsSource
from pagewire.services.executor.models.decoder import DecoderModel
from tests.pagewire.test_cli import pagewire_command
from tests.services.executor.loading.dense_weights import are_held, dense_tensors, padding_bytes
from tests.services.executor.loading.quantization.checkpoints import save_quantized
from tests.services.executor.loading.quantization.test_awq import CONFIG, pack_gemm
from tests.services.executor.loading.test_loader import edit_config, edit_weights
from tests.services.executor.loading.weights.test_gguf import tiny_model
from tests.services.executor.loading.weights.test_gguf_quantized import MIXTURES, SIZES, write_quantized
from tests.services.executor.models.test_models import CPU, assert_same_logits, save_tiny
from tests.sweep import examples

AWQ = CONFIG | {"group_size": 32, "modules_to_not_convert": ["layers.1.mlp.up_proj", "lm_head"]}
NAME = "model.layers.0.mlp.up_proj"


def pack(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    return None if "layers.1.mlp.up_proj" in name else pack_gemm(weight, 32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """An AWQ checkpoint of two layers, one projection of the second dense; and the model of its numbers."""
    path = tmp_path_factory.mktemp("awq")
    return path, save_quantized(path, AWQ, pack, hidden_size=48, intermediate_size=80, num_hidden_layers=2)


@pytest.fixture
def awq(saved: tuple[Path, PreTrainedModel], tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(saved[0], tmp_path / "awq"))


def load(path: Path, dtype: str = "float32", **options: Any) -> DecoderModel:
    model = load_model(path, dtype=dtype, device=CPU, **options)
    assert isinstance(model, DecoderModel)
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_none_loads_the_numbers_as_dense_weights(saved: tuple[Path, PreTrainedModel], dtype: str) -> None:
    path, expected = saved
    model = load(path, dtype, quantization="none")
    tensors = dense_tensors(model)
    for name, parameter in expected.named_parameters():
        assert are_held(tensors[name], parameter.to(tensors[name].dtype)), name
        assert tensors[name].dtype is (model.config.dtype if parameter.dim() > 1 else torch.float32), name
    size = sum(tensors[name].nbytes for name, _ in expected.named_parameters())
    assert model.weight_bytes == size + padding_bytes(model)
    if dtype == "float32":
        assert_same_logits(model, expected)


def test_none_dequantizes_gguf(tmp_path: Path) -> None:
    expected = tiny_model("Llama", **SIZES)
    write_quantized(tmp_path / "tiny.gguf", expected, "llama", MIXTURES["Q4_K_M"])
    model = load(tmp_path / "tiny.gguf", quantization="none")
    assert all(isinstance(part, Dense) for module in model.modules() for part in module.parts)
    assert_same_logits(model, expected)


def test_none_on_a_dense_checkpoint(tmp_path: Path) -> None:
    expected = save_tiny(tmp_path, "Llama")
    assert_same_logits(load(tmp_path, quantization="none"), expected)


@pytest.mark.parametrize("checkpoint_dtype", ["float16", "bfloat16"])
def test_dtype_auto_is_the_checkpoints(awq: Path, checkpoint_dtype: str) -> None:
    edit_config(awq, dtype=checkpoint_dtype)
    assert load(awq, "auto").config.dtype == getattr(torch, checkpoint_dtype)


@pytest.mark.parametrize("name", ["awq", "awq_marlin", None])
def test_the_format_of_the_checkpoint_may_be_requested(saved: tuple[Path, PreTrainedModel], name: str | None) -> None:
    assert len(load(saved[0], quantization=name).quantized_modules()) == 8


@pytest.mark.parametrize("name", ["gptq", "gptq_marlin", "compressed-tensors", "fp8", "gguf", "bitsandbytes"])
def test_another_format_is_refused(saved: tuple[Path, PreTrainedModel], name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"--quantization {name}: the checkpoint is quantized with awq; leave"):
        load(saved[0], quantization=name)


def test_a_format_of_a_dense_checkpoint_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    with pytest.raises(
        ModelLoadError, match=r"--quantization awq: the checkpoint is not quantized; .*pagewire quantize"
    ):
        load(tmp_path, quantization="awq")


def test_transformers_code_refuses_quantized_checkpoints(saved: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"quantized checkpoints run in .*; leave --model-impl out"):
        load_model(saved[0], device=CPU, model_impl="transformers")
    save_tiny(tmp_path, "StableLm")
    edit_config(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ModelLoadError, match=r"docs/models\.md lists its models; use a checkpoint in 16 bits"):
        load_model(tmp_path, device=CPU)
    with pytest.raises(ModelLoadError, match="--quantization awq: StableLmForCausalLM runs in transformers' code"):
        load_model(tmp_path, device=CPU, quantization="awq")


def test_one_progress_for_dense_and_quantized(saved: tuple[Path, PreTrainedModel]) -> None:
    reports: list[tuple[float, str]] = []
    load(saved[0], progress=lambda fraction, text: reports.append((fraction, text)))
    fractions, names = zip(*reports, strict=True)
    assert list(fractions) == sorted(fractions) and fractions[-1] == pytest.approx(1.0)
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj"} <= set(names)
    assert reports[0][0] < 0.6, "the share of a part is that of its bytes"


def test_the_form_of_weights_is_reported(saved: tuple[Path, PreTrainedModel], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model = load(saved[0])
    assert "quantization awq: 8 4-bit, groups of 32, 3 dense; " in caplog.text
    held = {"method": "awq", "form": "4-bit, groups of 32"}
    assert REGISTRY.get_sample_value("pagewire:executor_weights", held) == 8
    dense = sum(target.nbytes for target in model.load_targets().values())
    parts = [part for module in model.quantized_modules() for part in module.parts]
    assert model.weight_bytes == dense + sum(part.nbytes for part in parts)
    num_quantized = sum(part.shape[0] * part.shape[1] for part in parts if not isinstance(part, Dense))
    assert sum(part.nbytes for part in parts if not isinstance(part, Dense)) < num_quantized, "a byte per weight"


def test_dummy_weights_need_only_a_config(awq: Path) -> None:
    real = load(awq)
    (awq / "model.safetensors").unlink()
    edit_config(awq, quantization_config=AWQ)
    dummies = [load(awq, load_format="dummy", seed=seed) for seed in (0, 0, 1)]
    codes = [part.codes for dummy in dummies for part in dummy.layers[0].mlp.down.parts]  # type: ignore[attr-defined]
    assert torch.equal(codes[0], codes[1]), "whichever thread made it"
    assert not torch.equal(codes[0], codes[2])
    assert dummies[0].weight_bytes == real.weight_bytes
    assert load(awq, load_format="dummy", quantization="none").weight_bytes > 2 * real.weight_bytes


Changes = Mapping[str, Any]
QWEIGHT, SCALES = "model__layers__0__mlp__up_proj__qweight", "model__layers__0__mlp__up_proj__scales"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {QWEIGHT: torch.zeros(48, 9, dtype=torch.int32)},
            r"tensor {0}\.qweight: expected shape .*, found \[48, 9\]",
        ),
        ({QWEIGHT: torch.zeros(48, 10, dtype=torch.int64)}, r"tensor {0}\.qweight: expected int32, found int64"),
        ({SCALES: torch.full((2, 80), torch.nan).half()}, r"tensor {0}\.scales: has values that are not finite"),
        ({QWEIGHT: None}, r"1 tensor missing: {0}\.qweight"),
        ({SCALES: None}, r"1 tensor missing: {0}\.scales"),
        ({QWEIGHT.replace("qweight", "extra"): torch.zeros(1)}, r"1 tensor unexpected: {0}\.extra"),
    ],
)
def test_tensors_that_do_not_fit(awq: Path, changes: Changes, message: str) -> None:
    edit_weights(awq, **changes)
    with pytest.raises(ModelLoadError, match=f"{awq}: .*{message.format(NAME)}"):
        load(awq)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"group_size": 16}, "group_size 16"),
        ({"group_size": -1}, "group_size -1"),
        ({"group_size": 48}, "group_size 48"),
    ],
)
def test_a_wrong_config_is_named(awq: Path, changes: dict[str, Any], cause: str) -> None:
    edit_config(awq, quantization_config=AWQ | changes)
    with pytest.raises(ModelLoadError, match=rf"{awq}: tensor .*expected shape .*; {cause} in its config is wrong"):
        load(awq)


@settings(max_examples=examples(25), deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_truncated_anywhere(saved: tuple[Path, PreTrainedModel], share: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderModel, "forward", None)
        copy = saved[0].parent / "truncated"
        shutil.copytree(saved[0], copy, dirs_exist_ok=True)
        data = (saved[0] / "model.safetensors").read_bytes()
        (copy / "model.safetensors").write_bytes(data[: int(share * len(data))])
        with pytest.raises(ModelLoadError, match=r"model\.safetensors: truncated or not a safetensors file"):
            load(copy)


@pytest.mark.parametrize(("memory_bytes", "is_dense"), [(1 << 40, True), (1, False)])
def test_plain_torch_dequantizes_once_where_memory_suffices(
    saved: tuple[Path, PreTrainedModel], memory_bytes: int, is_dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "chosen", lambda: "torch")
    monkeypatch.setattr(memory, "available_bytes", lambda device: memory_bytes)
    monkeypatch.setattr(memory, "check_weights_fit", lambda num_bytes, device: None)
    model = load(saved[0])
    assert is_dense is all(isinstance(part, Dense) for module in model.modules() for part in module.parts)
    assert_same_logits(model, saved[1])


def test_a_damaged_checkpoint_ends_the_process_with_1(awq: Path, tmp_path: Path) -> None:
    edit_weights(awq, **{SCALES: torch.full((2, 80), torch.inf).half()})
    argv = ["executor", "--model", str(awq), "--device", "cpu", "--listen", f"unix:{tmp_path}/executor.sock"]
    result = pagewire_command(*argv, PAGEWIRE_CPU_KERNELS="torch")
    assert result.returncode == 1
    assert f"{awq}: tensor {NAME}.scales: has values that are not finite" in result.stderr
    assert "Traceback" not in result.stderr


class DevicesAreNamed(TorchFunctionMode):
    """Fails where a tensor is made without saying on which device: on a GPU it would be in the wrong memory."""

    FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor, torch.randperm)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func not in self.FACTORIES or kwargs.get("device") is not None, f"{func.__name__} without a device"
        return func(*args, **kwargs)


def test_weights_are_unpacked_and_packed_where_their_tensors_are(saved: tuple[Path, PreTrainedModel]) -> None:
    weights = SafetensorsSource(saved[0])
    model = load(saved[0])
    for shard in (shard for module in model.quantized_modules() for shard in module.shards if shard.format):
        with DevicesAreNamed():
            weight = read_shard(weights, shard, CPU)
            assert isinstance(weight, GroupedWeight)
            packed.pack_grouped(weight, "cuda")


def random_weight(form: str, num_outputs: int, num_inputs: int, generator: torch.Generator) -> QuantizedWeight | Tensor:
    def integers(low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=dtype)

    def floats(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) * 0.1 + 0.01

    kind, _, bits = form.partition(" ")
    if kind == "int8":
        return Int8Weight(integers(-128, 128, num_outputs, num_inputs, dtype=torch.int8), floats(num_outputs))
    if kind == "fp8":
        values = torch.randn(num_outputs, num_inputs, generator=generator).to(torch.float8_e4m3fn)
        blocks = (-(-num_outputs // 128), -(-num_inputs // 128)) if bits == "blocks" else (num_outputs,)
        return Fp8Weight(values, floats(*blocks))
    if kind == "dense":
        return torch.randn(num_outputs, num_inputs, generator=generator)
    groups = -(-num_inputs // 32)
    return GroupedWeight(
        integers(0, 2 ** int(bits), num_outputs, num_inputs, dtype=torch.uint8),
        int(bits),
        min(32, num_inputs),
        floats(num_outputs, groups).half(),
        offsets=integers(0, 2 ** int(bits), num_outputs, groups, dtype=torch.uint8),
        permutation=torch.randperm(num_inputs, generator=generator).int() if kind == "ordered" else None,
    )


def numbers(weight: QuantizedWeight | Tensor) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize()


FORMS = [f"grouped {bits}" for bits in BITS] + ["ordered 4", "int8", "fp8", "fp8 blocks", "dense"]


class AnyFormat:
    """The format of weights that a test makes itself."""

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        raise NotImplementedError

    def read(
        self, tensors: Mapping[str, Tensor], out_features: int, in_features: int, part: Part | None = None
    ) -> QuantizedWeight:
        raise NotImplementedError

    def random(self, out_features: int, in_features: int, generator: torch.Generator) -> QuantizedWeight:
        raise NotImplementedError


class Mixed:
    """Quantization of all modules but those called dense."""

    method = "mixed"

    def format(self, module: str) -> AnyFormat | None:
        return None if module.endswith("dense") else AnyFormat()


@settings(max_examples=examples(60), deadline=None)
@given(
    forms=st.lists(st.sampled_from(FORMS), min_size=1, max_size=4),
    sizes=st.lists(st.sampled_from([1, 5, 16, 33, 128, 130]), min_size=4, max_size=4),
    num_inputs=st.sampled_from([8, 32, 40, 96, 256]),
    dense=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 100),
)
def test_projections_of_any_forms_are_one_layer(
    forms: list[str], sizes: list[int], num_inputs: int, dense: bool, bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shards = {f"{index}.{form.split()[0]}": sizes[index] for index, form in enumerate(forms)}
    layer = Linear(num_inputs, shards, Placement(torch.float32, CPU, Mixed()), bias=bias)
    if layer.bias is not None:
        layer.bias.normal_(generator=generator)
    stored = {
        shard.name: random_weight(form, shard.out_features, num_inputs, generator)
        for shard, form in zip(layer.shards, forms, strict=True)
    }
    empty = (lambda *shape: torch.empty(*shape)) if dense else None
    run_jobs(install_jobs([layer], lambda shard: stored[shard.name], num_weights, empty), 1, lambda *_: None)
    x = torch.randn(3, num_inputs, generator=generator)
    expected = torch.nn.functional.linear(x, torch.cat([numbers(weight) for weight in stored.values()]), layer.bias)
    torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)
    assert len(layer.parts) <= (1 if dense else len(forms))


@settings(max_examples=examples(30), deadline=None)
@given(form=st.sampled_from(FORMS[:-1]), num_outputs=st.integers(1, 300), num_inputs=st.sampled_from([8, 40, 200]))
def test_dequantized_in_pieces(form: str, num_outputs: int, num_inputs: int) -> None:
    weight = random_weight(form, num_outputs, num_inputs, torch.Generator().manual_seed(0))
    assert not isinstance(weight, Tensor)
    target = torch.full((num_outputs, num_inputs), torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dequantize, "_CHUNK_WEIGHTS", 1)
        dequantize_into(target, weight)
    assert torch.equal(target, weight.dequantize())


def test_few_weights_are_unpacked_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number of threads there is: unpacked weights take up to a byte each, some of them several."""
    monkeypatch.setattr(install, "_MAX_WEIGHTS_IN_FLIGHT", 100)
    sizes = [4, 60, 30, 10, 120, 50, 7, 101, 90]
    in_flight, most, alone, lock = 0, 0, [], threading.Lock()

    def read(shard: Shard) -> Tensor:
        nonlocal in_flight, most
        with lock:
            in_flight += shard.out_features
            most = max(most, in_flight if shard.out_features <= 100 else 0)
            if shard.out_features > 100:
                alone.append(in_flight == shard.out_features)
        time.sleep(0.005)  # long enough for another thread to come, if nothing stops it
        with lock:
            in_flight -= shard.out_features
        return torch.zeros(shard.out_features, 1)

    layers = [Linear(1, {"a": size}, Placement(torch.float32, CPU, Mixed()), bias=False) for size in sizes]
    jobs = install_jobs(layers, read, num_weights)
    assert [job.num_bytes for job in jobs] == sorted(sizes, reverse=True)
    run_jobs(jobs, 6, lambda *_: None)
    assert most <= 100 and alone == [True, True]
    assert [layer.weight.shape for layer in layers] == [(size, 1) for size in sizes]
