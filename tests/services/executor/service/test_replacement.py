"""Other weights in the place of those that a runner computes with: all of them, or none."""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.services.executor.device import memory
from pagewire.services.executor.loading.twins import Differs
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.probe import BrokenModel
from pagewire.services.executor.service.replacement import load_weights
from pagewire.services.executor.service.worker import Worker
from pagewire.services.executor.start.startup import start_runner
from pagewire.v1 import executor_pb2, executor_pb2_grpc
from pagewire.v1.executor_pb2 import Weights
from pagewire.wire import rpc
from pagewire.wire.rpc import RpcError
from tests.services.executor.helpers.servicers import servicer_of
from tests.services.executor.helpers.stepping import Driver, graph_steps
from tests.services.executor.loading.quantization.checkpoints import save_quantized
from tests.services.executor.loading.quantization.test_awq import CONFIG as AWQ
from tests.services.executor.loading.quantization.test_awq import pack_gemm
from tests.services.executor.models.tiny import save_tiny

NUM_BLOCKS = 32


def save_other(source: Path, path: Path, change: Callable[[dict[str, torch.Tensor]], None] | None = None) -> Path:
    """The checkpoint with other numbers, and with `change` made to its tensors."""
    shutil.copytree(source, path)
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            factors = 1.0 + 0.5 * torch.randn(tensor.shape, generator=generator)
            tensors[name] = (tensor * factors).to(tensor.dtype)
    if change is not None:
        change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def started(model: Path, **flags: Any) -> tuple[ExecutorConfig, ModelRunner, ExecutorInfo]:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 8,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "num_threads": 1,
        **flags,
    }
    config = ExecutorConfig(model=str(model), **settings)
    return config, *start_runner(config, str(model), lambda fraction, text: None)


def generated(runner: ModelRunner) -> list[int]:
    driver = Driver(runner, NUM_BLOCKS)
    runner.reset()
    driver.add(0, [5, 17, 3, 60, 21, 8, 44, 12, 9, 30, 2, 51])
    tokens = driver.generate(0, 12, first=12)
    runner.reset()
    return tokens


def load(config: ExecutorConfig, runner: ModelRunner, path: Path, **weights: Any) -> Any:
    return load_weights(config, runner, Weights(model=str(path), number=1, **weights))


def _awq(path: Path) -> object:
    return save_quantized(path, AWQ | {"group_size": 32}, lambda _, weight: pack_gemm(weight, 32), num_hidden_layers=1)


def _tiny(family: str, **config: Any) -> Callable[[Path], object]:
    return lambda path: save_tiny(path, family, num_hidden_layers=2, **config)


MAMBA = {"state_size": 16, "num_heads": 12, "head_dim": 8, "n_groups": 1}


@pytest.mark.parametrize(
    ("save", "flags"),
    [
        (_tiny("Llama"), {}),
        (_tiny("Llama", tie_word_embeddings=True), {"dtype": "bfloat16"}),
        (_tiny("Llama"), {"enforce_eager": True, "model_impl": "transformers"}),
        (_tiny("Gemma2", head_dim=8), {}),
        (_tiny("Mamba2", **MAMBA), {"state_block_size": 8, "num_gpu_blocks_override": 32}),
        (_awq, {}),
    ],
    ids=["recorded", "packed", "transformers", "computed-norms", "states", "quantized"],
)
def test_a_runner_computes_with_the_new_weights_and_nothing_else(
    save: Callable[[Path], object], flags: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path / "a")
    other = save_other(tmp_path / "a", tmp_path / "b")
    config, runner, _ = started(tmp_path / "a", **flags)
    before = generated(runner)
    replays = graph_steps("replayed")
    loaded = load(config, runner, other)
    assert generated(runner) == before, "loading changes nothing"
    loaded.install(runner)
    after = generated(runner)
    assert after == generated(started(other, **flags)[1])
    assert after != before
    assert (graph_steps("replayed") > replays) != bool(flags.get("enforce_eager"))
    load(config, runner, tmp_path / "a").install(runner)
    assert generated(runner) == before


def test_the_digest_is_of_contents(tmp_path: Path) -> None:
    save_tiny(tmp_path / "a", "Llama")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    config, runner, info = started(tmp_path / "a")
    other = save_other(tmp_path / "a", tmp_path / "b")
    assert load(config, runner, tmp_path / "copy").weights.digest == info.weights_digest
    weights = load(config, runner, other).weights
    assert weights.digest != info.weights_digest
    assert weights.version == weights.digest
    assert load(config, runner, other, version="step-7").weights.version == "step-7"


def test_mapped_weights_stay_on_disk_as_they_are(tmp_path: Path) -> None:
    """Tests the weights cache, which the next start and other processes read."""
    save_tiny(tmp_path / "a", "Llama")
    flags = {"dtype": "bfloat16", "weights_cache": str(tmp_path / "cache")}
    before = generated(started(tmp_path / "a", **flags)[1])
    config, runner, _ = started(tmp_path / "a", **flags)
    load(config, runner, save_other(tmp_path / "a", tmp_path / "b")).install(runner)
    assert generated(runner) != before
    assert generated(started(tmp_path / "a", **flags)[1]) == before
    assert len(list((tmp_path / "cache").iterdir())) == 1


def _changed_config(name: str = "config.json", **keys: Any) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        config = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(config | keys))

    return change


def _truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _nan(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def _overflowing(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_truncate, "model.safetensors"),
        (_nan, "some weights are NaN"),
        (_overflowing, "yields no numbers"),
        (lambda path: (path / "model.safetensors").unlink(), "safetensors"),
        (_changed_config("generation_config.json", eos_token_id=9), "eos_token_ids"),
        (
            _changed_config(rope_theta=500.0, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
            "rope_theta",
        ),
        (_changed_config(rms_norm_eps=0.1), "eps is 0.1, where it is"),
        (_changed_config(vocab_size=70), "expected shape"),
    ],
    ids=["truncated", "nan", "overflow", "missing", "end-tokens", "rope", "norms", "vocabulary"],
)
def test_a_checkpoint_that_cannot_take_the_place_changes_nothing(
    damage: Callable[[Path], object], problem: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "a", "Llama")
    other = save_other(tmp_path / "a", tmp_path / "b")
    damage(other)
    config, runner, _ = started(tmp_path / "a")
    before = generated(runner)
    with pytest.raises((StartupError, Differs, BrokenModel), match=problem):
        load(config, runner, other)
    assert generated(runner) == before


def test_other_sizes_are_refused_by_name(tmp_path: Path) -> None:
    save_tiny(tmp_path / "a", "Llama")
    save_tiny(tmp_path / "b", "Llama", vocab_size=80)
    config, runner, _ = started(tmp_path / "a")
    with pytest.raises(Differs, match="vocab_size is 80, where it is 67 in the model that is served"):
        load(config, runner, tmp_path / "b")


def test_files_that_have_changed_since_are_not_taken_for_the_version(tmp_path: Path) -> None:
    save_tiny(tmp_path / "a", "Llama")
    config, runner, info = started(tmp_path / "a")
    other = save_other(tmp_path / "a", tmp_path / "b")
    with pytest.raises(RpcError, match="other weights than version v1") as caught:
        load(config, runner, other, version="v1", digest=info.weights_digest)
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION


def test_what_does_not_fit_beside_the_old_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "a", "Llama")
    config, runner, _ = started(tmp_path / "a")
    monkeypatch.setattr(memory, "available_cpu_bytes", lambda: 1000)
    with pytest.raises(memory.OutOfMemoryError):
        load(dataclasses.replace(config), runner, tmp_path / "a")


async def test_the_service_installs_the_loaded_weights_and_no_others(tmp_path: Path, sockets: str) -> None:
    save_tiny(tmp_path / "a", "Llama")
    other = save_other(tmp_path / "a", tmp_path / "b")
    config, runner, info = started(tmp_path / "a")
    before = generated(runner)
    worker = Worker(lambda: (runner, info), on_cuda=False)
    servicer = servicer_of(worker, config)
    server = rpc.Server([sockets], shutdown_timeout=1.0)
    add = executor_pb2_grpc.add_ExecutorServiceServicer_to_server
    server.add(servicer, add, "pagewire.v1.ExecutorService")
    await server.start()
    worker.start()
    async with rpc.channel(sockets) as channel:
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        described = await stub.Describe(executor_pb2.DescribeRequest())
        first = described.weights
        assert (first.version, first.number) == (info.weights_digest, 0)
        wanted = Weights(model=str(other), number=1, version="v1")
        loaded = (await stub.LoadWeights(executor_pb2.LoadWeightsRequest(weights=wanted))).weights
        assert loaded.version == "v1" and loaded.digest
        await stub.DropWeights(executor_pb2.DropWeightsRequest())
        for refused in (loaded, first):
            with pytest.raises(grpc.aio.AioRpcError, match="were not loaded"):
                await stub.InstallWeights(executor_pb2.InstallWeightsRequest(weights=refused))
        with pytest.raises(grpc.aio.AioRpcError, match="no such file"):
            missing = Weights(model=str(tmp_path / "missing"), number=1)
            await stub.LoadWeights(executor_pb2.LoadWeightsRequest(weights=missing))
        assert (await stub.Describe(executor_pb2.DescribeRequest())).weights == first
        steps = stub.Execute()
        await steps.write(executor_pb2.StepRequest(term=7))
        await steps.read()
        await stub.LoadWeights(executor_pb2.LoadWeightsRequest(weights=loaded))
        with pytest.raises(grpc.aio.AioRpcError, match="term 7"):
            await stub.InstallWeights(executor_pb2.InstallWeightsRequest(weights=loaded, term=6))
        await stub.InstallWeights(executor_pb2.InstallWeightsRequest(weights=loaded, term=7))
        assert await steps.read() is grpc.aio.EOF, "what was in rows and KV cache is void"
        assert (await stub.Describe(executor_pb2.DescribeRequest())).weights == loaded
    await server.stop()
    worker.stop()
    await servicer.close()
    assert generated(runner) == generated(started(other)[1]) != before


@pytest.fixture
def sockets() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pw-") as directory:
        yield f"unix:{directory}/executor.sock"
