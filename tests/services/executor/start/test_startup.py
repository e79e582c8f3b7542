"""The start of a runner: sizes, limits, and errors that say what to change."""

import dataclasses
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.config import ExecutorConfig
from pagewire.config.values.executor import block_size
from pagewire.errors import StartupError
from pagewire.kernels import backends
from pagewire.process import cgroup
from pagewire.services.executor import stats
from pagewire.services.executor.batch import kv_cache
from pagewire.services.executor.device import memory
from pagewire.services.executor.device.memory import OutOfMemoryError
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.pooling import LAST_STATE, Pooling
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.start.phases import Phases
from pagewire.services.executor.start.runner_setup import Setup, cuda_cache_bytes
from pagewire.services.executor.start.startup import resolve_device, start_runner
from pagewire.services.executor.step.limits import Limits
from tests.services.executor.helpers.fake_meter import FakeMeter
from tests.services.executor.helpers.stepping import CPU, Driver, prompt, write_tiny_llama

# 2 layers x 2 (key, value) x 2 heads x 16 tokens x 8 elements x 4 bytes
BLOCK_BYTES = 4096


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


def start(directory: Path, **settings: Any) -> tuple[ModelRunner, ExecutorInfo]:
    config = ExecutorConfig(
        model="tiny", device="cpu", dtype="float32", load_format="dummy", num_threads=1, max_num_seqs=4
    )
    config = dataclasses.replace(config, **settings)
    return start_runner(config, str(directory), lambda fraction, text: None)


def test_what_is_found_out_is_described(directory: Path):
    runner, info = start(directory, kv_cache_memory_bytes=10 * BLOCK_BYTES + 5)
    assert (info.model, info.device, info.dtype) == ("tiny", "cpu", "float32")
    assert (info.vocab_size, info.eos_token_ids, info.max_model_len) == (200, (2,), 96)
    assert (info.num_blocks, info.block_size, info.kv_cache_bytes) == (10, 16, 10 * BLOCK_BYTES)
    assert (info.max_num_seqs, info.max_num_batched_tokens) == (4, 2048)
    assert info.weight_bytes > 0 and runner.num_requests == 0
    assert start(directory, kv_cache_memory_bytes=10 * BLOCK_BYTES)[1].incarnation != info.incarnation


def test_ngrams_draft_by_default(directory: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        runner, info = start(directory)
    assert info.max_draft_tokens == 5 and len(info.decode_costs.steps) >= 2
    assert caplog.text.count("n-grams draft up to 5 tokens at once; --spec-method none turns them off") == 1
    driver = Driver(runner, info.num_blocks)
    text = [5, 9, 11, 7, 5, 9, 11]
    driver.add(0, text)
    driver.step({0: len(text)})
    driver.step({0: 6}, {0: 5})
    others, plain = start(directory, spec_method="none")
    assert (plain.max_draft_tokens, plain.decode_costs.steps) == (0, ())
    expected = Driver(others, plain.num_blocks)
    expected.add(0, text)
    assert driver.tokens[0] == expected.generate(0, 12, first=len(text))[: len(driver.tokens[0])]


def test_metrics_name_what_computes_attention(directory: Path):
    stats.ATTENTION_BACKEND.clear()
    captured = stats.CUDA_GRAPHS.labels("captured")
    before = captured._value.get()
    start(directory)
    [name] = stats.ATTENTION_BACKEND._metrics
    assert name == ("CPU_ATTN" if backends.cpu_backend() == "cpp" else "TORCH_SDPA",)
    assert captured._value.get() == before, "there are no CUDA graphs on a CPU"


def test_a_started_runner_works(directory: Path):
    runner, info = start(directory)
    driver = Driver(runner, info.num_blocks)
    driver.add(0, prompt(12))
    assert len(driver.generate(0, 3, first=12)) == 3


def test_a_head_size_that_no_kernel_takes_is_refused(tmp_path: Path):
    config = write_tiny_llama(tmp_path) / "config.json"
    config.write_text(config.read_text().replace('"head_dim": 8', '"head_dim": 12'))
    with pytest.raises(StartupError, match=r"multiple of 8 elements.* have 12"):
        start(tmp_path)


def test_a_request_needs_room_for_a_prompt_and_an_answer(directory: Path):
    with pytest.raises(StartupError, match="--max-model-len"):
        start(directory, max_model_len=1)
    assert start(directory, max_model_len=2)[1].max_model_len == 2


def test_the_cache_takes_no_more_than_all_rows_can_use(directory: Path):
    assert start(directory)[1].num_blocks == 4 * 96 // 16


def test_an_override_wins_and_bounds_the_longest_request(directory: Path):
    _, info = start(directory, num_gpu_blocks_override=3, kv_cache_memory_bytes=10**9)
    assert (info.num_blocks, info.max_model_len) == (3, 48)


def test_max_model_len_is_served_as_asked(directory: Path):
    assert start(directory, max_model_len=50)[1].max_model_len == 50


def test_a_cache_too_small_for_one_request_says_what_to_change(directory: Path):
    with pytest.raises(OutOfMemoryError, match=r"80 tokens.*96 tokens.*--max-model-len to 80.*--kv-cache-memory-bytes"):
        start(directory, kv_cache_memory_bytes=5 * BLOCK_BYTES)
    assert issubclass(OutOfMemoryError, StartupError), "the command line prints it without a traceback"


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"kv_cache_memory_bytes": 2**60}, "--kv-cache-memory-bytes"),
        ({"num_gpu_blocks_override": 2**50}, "--num-gpu-blocks-override"),
    ],
)
def test_a_cache_larger_than_memory_says_what_to_lower(directory: Path, settings: dict[str, int], flag: str):
    with pytest.raises(OutOfMemoryError, match=rf"KV cache would be .*cpu has .* free; lower {flag}"):
        start(directory, **settings)


@pytest.mark.parametrize("max_num_seqs", [1, 4])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 3])
def test_steps_smaller_than_the_warm_up(directory: Path, max_num_seqs: int, max_num_batched_tokens: int):
    _, info = start(directory, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    assert (info.max_num_seqs, info.max_num_batched_tokens) == (max_num_seqs, max_num_batched_tokens)


def test_default_share_of_memory():
    one_gib = 2**30
    assert kv_cache.default_cpu_bytes(8 * one_gib, 10**12) == 2 * one_gib
    assert kv_cache.default_cpu_bytes(400 * one_gib, 10**12) == 4 * one_gib
    assert kv_cache.default_cpu_bytes(400 * one_gib, 3 * 4096) == 3 * 4096


def test_weights_that_do_not_fit_are_refused_with_both_numbers(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "available_cpu_bytes", lambda: 30_000)
    with pytest.raises(OutOfMemoryError, match=r"weights need 0\.1 MiB, cpu has 0\.0 MiB"):
        start(directory)


def test_available_memory_is_measured():
    assert 2**26 < memory.available_cpu_bytes() < 2**50


def test_the_containers_limit_bounds_the_default_cache(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cgroup, "available_memory", lambda: 2**20)
    assert memory.available_cpu_bytes() == 2**20
    assert start(directory, max_num_seqs=2048, spec_method="none")[1].kv_cache_bytes == 2**18, (
        "a quarter of what is free"
    )


def test_cuda_without_cuda_is_an_error():
    if torch.cuda.is_available():
        pytest.skip("has CUDA")
    assert resolve_device("auto") == CPU
    with pytest.raises(StartupError, match="--device cpu"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("capability", "block_size", "message"),
    [((7, 5), 16, r"Fake GPU has compute capability 7\.5.* 8\.0 .*or above"), ((9, 0), 8, "--block-size 8: .* 16, 32")],
)
def test_what_the_cuda_kernels_cannot_do_is_refused_at_once(
    capability: tuple[int, int], block_size: int, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake GPU")
    with pytest.raises(StartupError, match=message):
        start(Path("no such model"), device="cuda", block_size=block_size)


@pytest.mark.parametrize(
    ("settings", "capability", "expected"),
    [
        ({}, 0.0, 16),
        ({}, 8.9, 16),
        ({}, 9.0, 64),
        ({"block_size": 16}, 9.0, 16),
        ({"block_size": 128}, 0.0, 128),
        ({"state_block_size": 32}, 9.0, 16),  # a state is kept every so many blocks
    ],
)
def test_blocks_are_large_where_prompts_are_read_by_blocks(
    settings: dict[str, Any], capability: float, expected: int
) -> None:
    assert block_size(ExecutorConfig(model="tiny", **settings), capability) == expected


def test_an_executor_on_a_gpu_loads_none_of_the_cpu_kernels(tmp_path: Path) -> None:
    """The decision, for which a compiler is looked for, is made by the first op on a CPU."""
    code = (
        "import importlib, pkgutil, sys\n"
        "import pagewire.services.executor as executor\n"
        "for found in pkgutil.walk_packages(executor.__path__, 'pagewire.services.executor.'):\n"
        "    if not found.name.endswith('.recorded_steps'):  # the steps of the CPU\n"
        "        importlib.import_module(found.name)\n"
        "print([name for name in sys.modules if name.startswith('pagewire.kernels.cpu.runtime')])\n"
        "from pagewire.kernels import backends\n"
        "print(backends.chosen.cache_info().misses)\n"
    )
    environment = {**os.environ, "CXX": "no-such-compiler", "PAGEWIRE_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == ["[]", "0"], ran.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("choice", ["tritn", "triton"])
def test_cpu_kernels_that_cannot_be_had_are_refused_at_once(choice: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends, "chosen", backends.choose)
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", choice)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(StartupError, match=rf"PAGEWIRE_CPU_KERNELS='{choice}'"):
        start(Path("no such model"))


def test_an_empty_choice_of_cpu_kernels_is_none(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PAGEWIRE_CPU_KERNELS", raising=False)
    default = backends.choose()
    monkeypatch.setattr(backends, "chosen", backends.choose)
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "")
    start(directory)
    assert backends.cpu_backend() == default


def test_the_interpreter_is_refused_what_it_computes_wrongly(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends, "chosen", lambda: "triton")
    with pytest.raises(StartupError, match=r"bfloat16 wrongly; add --dtype float32"):
        start(directory, dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "dtype", "page"),
    [
        ("auto", None, (2, 2, 16, 8)),
        ("fp8", torch.float8_e4m3fn, (2, 2, 16, 8)),
        ("int8", torch.int8, (2 * 2 * 16 * (8 + 2),)),
    ],
)
@pytest.mark.parametrize("of_model", ["float32", "bfloat16"])
def test_the_cache_is_zero_and_of_the_dtype_asked_for(
    directory: Path, of_model: str, name: str, dtype: torch.dtype | None, page: tuple[int, ...]
):
    model = load_model(directory, dtype=of_model, device=CPU, load_format="dummy", kv_cache_dtype=name)
    (cache,) = kv_cache.allocate(model, [5], 16, CPU)
    assert (cache.shape, cache.dtype) == ((5, 2, *page), dtype or getattr(torch, of_model))
    assert not cache.view(torch.uint8).any()
    assert cache.nbytes == kv_cache.cache_bytes(model, 5, Limits(1, 1, 96, block_size=16))
    assert cache[3].is_contiguous(), "a page of all layers is one piece"
    assert [layer.kv_cache.data_ptr() for layer in model.attention_layers] == [cache[:, i].data_ptr() for i in (0, 1)]


@pytest.mark.parametrize(("name", "per_element"), [("fp8", 1), ("fp8_e4m3", 1), ("int8", 1 + 2 / 8)])
def test_a_cache_of_8_bits_has_more_blocks_and_works(directory: Path, name: str, per_element: float):
    """One byte an element in place of four, and with int8 a scale of two for each head of 8."""
    runner, info = start(directory, kv_cache_dtype=name, kv_cache_memory_bytes=10 * BLOCK_BYTES)
    assert (info.num_blocks, info.kv_cache_bytes, info.dtype) == (40 / per_element, 10 * BLOCK_BYTES, "float32")
    driver = Driver(runner, info.num_blocks)
    driver.add(0, prompt(12))
    assert len(driver.generate(0, 3, first=12)) == 3


def test_a_cache_of_another_16_bit_type_is_refused(directory: Path):
    with pytest.raises(StartupError, match=r"--kv-cache-dtype float16: .* \(float32\) or in 8 bits"):
        start(directory, kv_cache_dtype="float16")
    assert start(directory, dtype="bfloat16", kv_cache_dtype="bfloat16")[1].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cudagraph_capture_sizes": (1, 5)}, r"--cudagraph-capture-sizes 5: a step has at most 4 requests"),
        ({"max_cudagraph_capture_size": 5}, r"--max-cudagraph-capture-size 5: a step has at most 4 requests"),
        ({"max_cudagraph_capture_size": 3, "max_num_batched_tokens": 2}, r"at most 2 requests"),
        (
            {"cudagraph_capture_sizes": (1, 2), "max_cudagraph_capture_size": 4},
            r"--max-cudagraph-capture-size 4 contradicts --cudagraph-capture-sizes with a largest size of 2",
        ),
    ],
)
def test_wrong_capture_sizes(directory: Path, settings: dict[str, Any], message: str):
    with pytest.raises(StartupError, match=message):
        start(directory, **settings)


def test_graphs_asked_for_on_a_cpu_are_refused_in_the_log(directory: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger="pagewire.services.executor.start.startup"):
        start(directory)
        assert not any("CUDA graphs" in message for message in caplog.messages)
        start(directory, cudagraph_capture_sizes=(1, 2))
    assert [message for message in caplog.messages if "CUDA" in message] == ["CUDA graphs are off: steps run on cpu"]


def test_drafts_that_a_request_has_no_room_for_are_not_measured(directory: Path):
    assert len(start(directory, max_num_batched_tokens=1, max_num_seqs=1)[1].decode_costs.steps) == 1
    short = start(directory, max_model_len=4)[1].decode_costs
    assert len(short.steps) >= 2


def test_seconds_per_phase_are_reported(directory: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger="pagewire.services.executor.start.startup"):
        start(directory)
    (line,) = caplog.messages
    phases = ("weights", "drafter", "kv cache", "warm up", "decode costs")
    assert re.fullmatch("ready: " + ", ".join(rf"{phase} [\d.]+ s" for phase in phases), line)
    assert stats.LOAD_SECONDS.labels("warm_up")._value.get() > 0


def test_a_second_start_on_a_device_is_not_measured(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", str(tmp_path))
    config = ExecutorConfig(gpu_memory_utilization=0.8, max_num_seqs=4)
    model = load_model(directory, dtype="float32", device=CPU, load_format="dummy")

    def phases_of(limits: Limits, pooling: Pooling = LAST_STATE) -> str:
        setup = Setup(config, model, limits, (), CPU, pooling=pooling)
        phases = Phases()
        meter = FakeMeter(lambda: 0)
        # 10000 bytes, 600 of them outside of torch and 500 at the peak
        assert cuda_cache_bytes(setup, directory, meter, phases, lambda fraction, text: None) == 8000 - 600 - 500
        return str(phases)

    limits = Limits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=96, block_size=16)
    assert "cached" not in phases_of(limits)
    assert re.fullmatch(r"memory profile [\d.]+ s \(cached\)", phases_of(limits))
    assert "cached" not in phases_of(dataclasses.replace(limits, max_num_seqs=3))
    assert "cached" not in phases_of(limits, dataclasses.replace(LAST_STATE, kind="embed"))


def test_memory_that_runs_out_at_start_says_what_to_lower(directory: Path, monkeypatch: pytest.MonkeyPatch):
    def allocate(*args: object) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    monkeypatch.setattr(kv_cache, "allocate", allocate)
    with pytest.raises(OutOfMemoryError, match=r"\(kv cache\): lower --max-num-batched-tokens.*2\.00 GiB"):
        start(directory)


def test_progress_is_reported(directory: Path):
    config = ExecutorConfig(device="cpu", load_format="dummy", num_threads=1, max_num_seqs=4)
    texts: list[str] = []
    start_runner(config, str(directory), lambda fraction, text: texts.append(f"{fraction:.2f} {text}"))
    assert texts[-2:] == ["1.00 KV cache", "1.00 warm-up"]
