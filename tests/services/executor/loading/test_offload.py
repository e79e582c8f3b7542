"""Weights in host memory: when they are copied, where they lie, what is refused. A stand-in has the device's part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.device import memory
from pagewire.services.executor.loading import load_own, offload
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.models.streaming import BUFFERS, StreamedWeights
from pagewire.services.executor.parallel.communicator import Communicator
from pagewire.services.executor.parallel.stage import Stage
from pagewire.services.executor.service.replacement import load_weights
from pagewire.services.executor.start.startup import start_runner
from pagewire.v1.executor_pb2 import Weights
from tests.services.executor.helpers.paged_batch import mixed_batch_logits
from tests.services.executor.helpers.stepping import write_tiny_llama
from tests.services.executor.loading.quantization.checkpoints import save_quantized
from tests.services.executor.loading.quantization.test_awq import CONFIG, pack_gemm
from tests.services.executor.models.tiny import assert_same_logits, load, save_tiny
from tests.services.executor.parallel.threads import on_ranks

LAYERS = 7
MIB = 2**20


@dataclass
class FakeCopies:
    """Copies that run as late as they may, or as early, and fail where a device's could overwrite a buffer in use."""

    late: bool
    waiting: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # copies that have not run
    num_started: int = 0
    clock: int = 0  # of what is computed
    used: dict[int, int] = field(default_factory=dict)  # buffer's address -> the clock when it was last read
    current: int | None = None  # address of the buffer that the next layer reads
    targets: list[int] = field(default_factory=list)  # of each copy

    def now(self) -> int:
        return self.clock

    def copy(self, target: Tensor, source: Tensor, after: int) -> int:
        assert self.used.get(target.data_ptr(), 0) <= after, "a buffer is overwritten while a layer may read it"
        self.waiting.append((target, source))
        self.targets.append(target.data_ptr())
        self.num_started += 1
        if not self.late:
            self.run(self.num_started)
        return self.num_started

    def hold(self, mark: int) -> None:
        self.run(mark)
        self.current = self.targets[mark - 1]

    def run(self, mark: int) -> None:
        while self.num_started - len(self.waiting) < mark:
            target, source = self.waiting.pop(0)
            target.copy_(source)

    def compute(self) -> None:
        self.clock += 1
        if self.current is not None:
            self.used[self.current] = self.clock
            self.current = None


class Probe:
    """A layer that tells the copies when it is computed."""

    def __init__(self, layer: Any, copies: FakeCopies) -> None:
        self.layer, self.copies = layer, copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __call__(self, *args: Any) -> Any:
        self.copies.compute()
        return self.layer(*args)


@pytest.fixture(params=["late", "early"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCopies]:
    fake = FakeCopies(request.param == "late")
    monkeypatch.setattr(load_own, "CudaCopies", lambda device: fake)
    yield fake
    assert not fake.waiting, "work that nothing waits for is left, with which no capture can end"


def streamed(model: Model) -> StreamedWeights:
    weights = model.arriving.__self__  # type: ignore[attr-defined]
    assert isinstance(weights, StreamedWeights)
    return weights


def with_probes(model: Any, copies: FakeCopies) -> Model:
    model.layers = [Probe(layer, copies) for layer in model.layers]
    return model


def layer_bytes(path: Path, **options: Any) -> int:
    layer = load(path, **options).layers[0]  # type: ignore[attr-defined]
    return sum(part.nbytes for module in offload._modules(layer) for part in module.parts)


FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "Mixtral": {"num_local_experts": 4},
    "Phi3": {"pad_token_id": 0},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [3, 4, LAYERS])
def test_a_model_computes_what_it_does_without(tmp_path: Path, copies: FakeCopies, family: str, count: int) -> None:
    """A layer before its weights are there, or with another's, would give other numbers."""
    expected = save_tiny(tmp_path, family, num_hidden_layers=LAYERS, **FAMILIES[family])
    model = load(tmp_path, offload_bytes=count * layer_bytes(tmp_path) + 100)
    weights = streamed(model)
    assert len(weights.host) == count and max(weights.host) == LAYERS - 1
    assert_same_logits(with_probes(model, copies), expected)
    assert copies.num_started % count == 0 and copies.num_started >= 2 * count, "each step copies each layer once"


@pytest.mark.parametrize("quantization", [None, "none"])
def test_quantized_weights(tmp_path: Path, copies: FakeCopies, quantization: str | None) -> None:
    config = CONFIG | {"group_size": 32}
    sizes: Any = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": LAYERS}
    expected = save_quantized(tmp_path, config, lambda name, weight: pack_gemm(weight, 32), **sizes)
    model = load(tmp_path, offload_bytes=MIB, quantization=quantization)
    assert len(streamed(model).host) == LAYERS
    assert_same_logits(with_probes(model, copies), expected)


def test_buffers_have_the_only_weights_of_such_layers(tmp_path: Path, copies: FakeCopies) -> None:
    """Layers take turns, so that a copy has one in between; norms and other layers' weights stay where they are."""
    save_tiny(tmp_path, "Llama", num_hidden_layers=LAYERS)
    model: Any = load(tmp_path, offload_bytes=4 * layer_bytes(tmp_path))
    weights = streamed(model)
    assert list(weights.host) == [0, 2, 4, 6] and len(weights.buffers) == BUFFERS
    places = [buffer.untyped_storage().data_ptr() for buffer in weights.buffers]
    for index, layer in enumerate(model.layers):
        parts: list[Any] = [part for module in offload._modules(layer) for part in module.parts]
        found = {part.tensor.untyped_storage().data_ptr() for part in parts}
        assert found == {places[index // 2 % 2]} if index in weights.host else not found & set(places), index
        assert layer.input_norm.weight.untyped_storage().data_ptr() not in places


def test_the_layers_of_a_stage(tmp_path: Path, copies: FakeCopies) -> None:
    """Ranks have five and four layers, as the head counts as one."""
    save_tiny(tmp_path, "Llama", num_hidden_layers=9)
    one = layer_bytes(tmp_path)
    for rank, layers in enumerate(([0, 2, 4], [0, 1, 3])):
        model: Any = load(tmp_path, offload_bytes=3 * one, stage=Stage(rank, 2))
        assert list(streamed(model).host) == layers
        assert [layer.layer_idx for layer in model.attention_layers][layers[-1]] == (4, 8)[rank]
    assert not copies.num_started, "nothing was computed"


def test_ranks_have_buffers_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "Llama", num_hidden_layers=LAYERS)
    monkeypatch.setattr(load_own, "CudaCopies", lambda device: FakeCopies(late=True))
    expected = mixed_batch_logits(load(tmp_path), 67)

    def logits(ranks: Communicator) -> list[tuple[list[int], Tensor]]:
        return mixed_batch_logits(load(tmp_path, tensor=ranks, offload_bytes=MIB), 67)

    for found in on_ranks(2, logits):
        for (_, actual), (_, wanted) in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted, atol=2e-4, rtol=1e-4)


def test_what_saves_nothing_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", num_hidden_layers=LAYERS)
    with pytest.raises(ModelLoadError, match=r"--cpu-offload-gb \S+: it frees nothing.* give \S+ or more"):
        load(tmp_path, offload_bytes=2 * layer_bytes(tmp_path))


def test_more_than_the_host_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "Llama", num_hidden_layers=LAYERS)
    one = layer_bytes(tmp_path)
    monkeypatch.setattr(memory, "available_cpu_bytes", lambda: 3 * one)
    with pytest.raises(memory.OutOfMemoryError, match=r"--cpu-offload-gb \S+: .* MiB free; lower it"):
        load(tmp_path, offload_bytes=4 * one)


def test_models_without_such_layers_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", num_hidden_layers=LAYERS)
    with pytest.raises(ModelLoadError, match="--cpu-offload-gb: LlamaForCausalLM runs in transformers' code"):
        load(tmp_path, model_impl="transformers", offload_bytes=MIB)


def test_a_cpu_has_nothing_to_move(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    config = ExecutorConfig(model=str(tmp_path), load_format="dummy", device="cpu", cpu_offload_gb=4)
    with pytest.raises(
        StartupError, match="--cpu-offload-gb 4: weights on a CPU are in the memory of the host already"
    ):
        start_runner(config, str(tmp_path), lambda fraction, text: None)


def test_weights_in_host_memory_are_not_replaced(tmp_path: Path) -> None:
    config = ExecutorConfig(model=str(tmp_path), cpu_offload_gb=4)
    with pytest.raises(StartupError, match="--cpu-offload-gb: weights in host memory are not replaced"):
        load_weights(config, None, Weights(model=str(tmp_path)))  # type: ignore[arg-type]
