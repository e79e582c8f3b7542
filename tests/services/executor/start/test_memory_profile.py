"""The memory that serving takes beside the KV cache: measured with a fake meter, and kept between starts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagewire.services.executor.device.memory import DeviceMemory
from pagewire.services.executor.graphs.cuda_graphs import Function
from pagewire.services.executor.loading.weights.identity import model_key
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.prompt_logprobs import PromptLogprobs
from pagewire.services.executor.sampling.logprobs import LogprobsMode
from pagewire.services.executor.start.kv_cache_size import MemoryProfile, graphs_bytes, kv_cache_bytes
from pagewire.services.executor.start.memory_profile import cached_or_measured, measure, profile_run
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.step import Step, StepOutput
from tests.services.executor.graphs.test_cuda_graphs import ReplayedFunction
from tests.services.executor.helpers.fake_meter import FakeMeter
from tests.services.executor.helpers.stepping import CPU, tiny_llama

LIMITS = Limits(max_num_seqs=6, max_num_batched_tokens=32, max_model_len=96, block_size=16)
PROFILE = MemoryProfile(peak_bytes=500, library_bytes=30, graph_bytes=70)
KEY = {"model": "m", "dtype": torch.bfloat16, "sizes": (1, 2)}


class RecordingRunner(ModelRunner):
    def __init__(self, directory: Path) -> None:
        self.steps: list[Step] = []
        model = tiny_llama(directory)
        scores = PromptLogprobs(model, CPU, LogprobsMode.RAW_LOGPROBS)
        super().__init__(model, LIMITS, 1, CPU, prompt_scores=scores)

    def execute(self, step: Step, launching: Callable[[float], None] = lambda load: None) -> StepOutput:
        self.steps.append(step)
        return super().execute(step, launching)


def test_the_cache_gets_what_is_left():
    memory = DeviceMemory(total=1000, free=550, reserved=400)
    assert memory.outside_torch == 50
    assert kv_cache_bytes(memory, 0.9, PROFILE) == 900 - 50 - 30 - 500 - 70
    assert kv_cache_bytes(memory, 0.5, PROFILE) < 0


def test_graphs_beyond_the_second_take_what_the_second_took():
    assert graphs_bytes(100, 7, 35) == 100 + 34 * 7
    assert [graphs_bytes(100, 0, 1), graphs_bytes(0, 0, 0), graphs_bytes(100, -5, 3)] == [100, 0, 100]


def test_the_profile_is_of_the_most_costly_steps(tmp_path: Path):
    runner = RecordingRunner(tmp_path)
    profile_run(runner)
    most_tokens, most_decodes, most_scored = runner.steps
    assert most_tokens.num_scheduled_tokens.sum() == 32 and len(most_tokens.request_ids) == 6
    assert most_decodes.num_scheduled_tokens.tolist() == [1] * 6
    assert most_scored.num_scheduled_tokens.tolist() == [32]
    assert most_scored.new_requests[0].sampling.prompt_logprobs == 20
    for step in (most_tokens, most_decodes):
        assert len(step.new_requests[0].token_ids) == 95, "all but the token to sample"
        for request in step.new_requests:
            sampling = request.sampling
            assert sampling.repetition_penalty != 1 and sampling.frequency_penalty != 0 and sampling.logit_bias_ids
            assert (sampling.logprobs, sampling.temperature) == (20, 1.0)
    assert runner.num_requests == 0


def test_graphs_are_estimated_from_the_two_largest(tmp_path: Path):
    runner, captured = RecordingRunner(tmp_path), 0

    def record(function: Function) -> ReplayedFunction:
        nonlocal captured
        captured += 1
        return ReplayedFunction(function)

    def taken() -> int:
        # 20 bytes of libraries from the first step on; two recordings (model and sampler) of each size
        return 20 * bool(runner.steps) + {0: 0, 2: 300, 4: 310}[captured]

    profile = measure(runner, (1, 2, 4, 6), FakeMeter(taken), lambda: record)
    assert profile == MemoryProfile(peak_bytes=500, library_bytes=20, graph_bytes=300 + 3 * 10)
    assert captured == 4


def test_what_steps_leave_in_torchs_cache_is_not_the_graphs(tmp_path: Path):
    """Steps leave 1000 bytes behind for the next one; a capture gives them back to the device before it begins."""
    runner, captured, steps_released = RecordingRunner(tmp_path), 0, 0

    class CachingMeter(FakeMeter):
        def release(self) -> None:
            nonlocal steps_released
            steps_released = len(runner.steps)

    def record(function: Function) -> ReplayedFunction:
        nonlocal captured
        captured += 1
        meter.release()
        return ReplayedFunction(function)

    def taken() -> int:
        return {0: 0, 2: 300, 4: 310}[captured] + 1000 * (len(runner.steps) > steps_released)

    meter = CachingMeter(taken)
    assert measure(runner, (1, 2, 4, 6), meter, lambda: record).graph_bytes == 300 + 3 * 10


def test_without_graphs_none_is_captured(tmp_path: Path):
    def recorder() -> Callable[[Function], ReplayedFunction]:
        raise AssertionError

    assert measure(RecordingRunner(tmp_path), (), FakeMeter(lambda: 0), recorder).graph_bytes == 0


def fails() -> MemoryProfile:
    raise AssertionError("measured again")


def test_a_second_start_reads_what_the_first_measured(tmp_path: Path):
    assert cached_or_measured(KEY, lambda: PROFILE, tmp_path / "profiles") == (PROFILE, False)
    assert cached_or_measured(KEY, fails, tmp_path / "profiles") == (PROFILE, True)
    other = MemoryProfile(1, 2, 3)
    assert cached_or_measured(KEY | {"sizes": (1, 4)}, lambda: other, tmp_path / "profiles") == (other, False)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: "{",
        lambda content: "[]",
        lambda content: json.dumps(content | {"key": {"model": "another"}}),
        lambda content: json.dumps(content | {"profile": {"peak_bytes": 1}}),
        lambda content: json.dumps(content | {"profile": content["profile"] | {"peak_bytes": -1}}),
    ],
)
def test_a_damaged_file_is_replaced(
    tmp_path: Path, damage: Callable[[dict[str, object]], str], caplog: pytest.LogCaptureFixture
):
    cached_or_measured(KEY, lambda: MemoryProfile(1, 2, 3), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(damage(json.loads(file.read_text())))
    with caplog.at_level("INFO"):
        assert cached_or_measured(KEY, lambda: PROFILE, tmp_path) == (PROFILE, False)
    (message,) = caplog.messages
    assert str(file) in message
    assert cached_or_measured(KEY, fails, tmp_path) == (PROFILE, True)


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    with caplog.at_level("INFO"):
        assert cached_or_measured(KEY, lambda: PROFILE, tmp_path / "file" / "profiles") == (PROFILE, False)
    assert any("not kept" in message for message in caplog.messages)


def test_what_another_process_took_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    disturbed = MemoryProfile(peak_bytes=1, library_bytes=3 * 2**30, graph_bytes=0)
    assert cached_or_measured(KEY, lambda: disturbed, tmp_path) == (disturbed, False)
    assert "another process" in caplog.text and not list(tmp_path.iterdir())


def test_the_key_changes_with_the_models_files(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    key = model_key(tmp_path)
    (tmp_path / "notes.txt").write_text("changed")
    assert model_key(tmp_path) == key
    (tmp_path / "model.safetensors").write_text("weights")
    assert model_key(tmp_path) != key
    assert model_key(tmp_path / "config.json")["files"].keys() == {"config.json"}
