"""A model divided into stages has the tokens that it has in one piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.kernels.ops import cpu_backend
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.models.causal import CausalModel
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.parallel.stage import Stage, divide
from pagewire.services.executor.runner.model_runner import ModelRunner
from tests.services.executor.helpers.staged import LocalPipe, Staged, joined_runners, local_runners
from tests.services.executor.helpers.stepping import GREEDY, LIMITS, Driver, alone, make_driver, prompt
from tests.services.executor.models.tiny import load, save_tiny

NUM_TOKENS = 12
SIZES: dict[str, Any] = {"vocab_size": 200, "max_position_embeddings": 96, "head_dim": 8, "num_hidden_layers": 6}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen3": {"tie_word_embeddings": False},
    "Gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 8},
    "Gemma3Text": {"query_pre_attn_scalar": 8, "sliding_window": 8, "layer_types": WINDOWS[:6]},
    "Mixtral": {"num_local_experts": 4},
    "GPT2": {"n_embd": 48, "n_layer": 6, "n_head": 6, "n_positions": 96},
    "Mamba2": {"num_heads": 6, "head_dim": 16, "expand": 2, "state_size": 16, "n_groups": 1, "residual_in_fp32": True},
}


@contextmanager
def running(runners: Sequence[ModelRunner]) -> Iterator[Staged]:
    pipeline = Staged(runners)
    try:
        yield pipeline
    finally:
        pipeline.stop()


def staged(path: Path, count: int, tokens: LocalPipe | None = None, **options: Any) -> AbstractContextManager[Staged]:
    models = [load(path, stage=Stage(index, count), **options) for index in range(count)]
    return running(local_runners(models, LIMITS, 64, recorded, tokens or LocalPipe()))


def recorded() -> Any:
    if cpu_backend() != "cpp":
        return None
    from pagewire.services.executor.graphs.recorded_steps import RecordedSteps

    return RecordedSteps(LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens)


def generate_in_turns(driver: Driver, num_stages: int) -> dict[int, list[int]]:
    """Requests in as many cohorts as there are stages, with a step more in flight than stages, as the scheduler has."""
    for request_id in range(2 * num_stages):
        driver.add(request_id, prompt(3 + request_id, seed=request_id))
    cohorts = [[index, index + num_stages] for index in range(num_stages)]
    in_flight = [driver.launch({one: 3 + one for one in cohort}) for cohort in cohorts]
    for turn in range((NUM_TOKENS - 1) * num_stages):
        in_flight.append(driver.launch(dict.fromkeys(cohorts[turn % num_stages], 1)))
        driver.collect(in_flight.pop(0))
    for output in in_flight:
        driver.collect(output)
    return driver.tokens


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few("Llama-3", "Gemma3Text-2", "Mixtral-3", "GPT2-2", "Mamba2-2")
def test_stages_have_the_tokens_of_the_whole(tmp_path: Path, family: str, count: int) -> None:
    save_tiny(tmp_path, family, **SIZES | FAMILIES[family])
    whole = load(tmp_path)
    with staged(tmp_path, count) as pipeline:
        driver = Driver(pipeline, 64)  # type: ignore[arg-type]
        tokens = generate_in_turns(driver, count)
    for request_id, found in tokens.items():
        assert found == alone(whole, prompt(3 + request_id, seed=request_id), NUM_TOKENS)


@pytest.mark.parametrize(("tensor", "stages"), [(1, 3), (2, 2)])
def test_ranks_that_share_layers_are_a_stage_together(tmp_path: Path, tensor: int, stages: int) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 64}
    save_tiny(tmp_path, "Qwen3", **SIZES | sizes | {"tie_word_embeddings": True})
    whole = load(tmp_path)
    runners = joined_runners(
        lambda group: load(tmp_path, tensor=group.tensor, stage=group.stage), tensor, stages, LIMITS, 64
    )
    with running(runners) as pipeline:
        driver = Driver(pipeline, 64)  # type: ignore[arg-type]
        tokens = generate_in_turns(driver, stages)
    for request_id, found in tokens.items():
        assert found == alone(whole, prompt(3 + request_id, seed=request_id), NUM_TOKENS)


def test_rows_go_to_others_while_tokens_are_under_way(tmp_path: Path) -> None:
    """A request ends with a token in flight, and its row is another one's before the first stage has received it."""
    save_tiny(tmp_path, "Llama", **SIZES)
    whole = load(tmp_path)
    with staged(tmp_path, 2) as pipeline:
        driver = Driver(pipeline, 64)  # type: ignore[arg-type]
        driver.add(0, prompt(5))
        outputs = [driver.launch({0: 5}), driver.launch({0: 1})]
        driver.finish(0)
        driver.add(1, prompt(20, seed=1))
        outputs += [driver.launch({1: 16}), driver.launch({1: 4})]
        outputs += [driver.launch({1: 1}) for _ in range(6)]
        for output in outputs:
            driver.collect(output)
        assert driver.tokens[1] == alone(whole, prompt(20, seed=1), 7)


def test_tokens_that_no_step_waits_for_do_not_pile_up(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", **SIZES)
    tokens = LocalPipe()
    with staged(tmp_path, 2, tokens) as pipeline:
        driver = Driver(pipeline, 64)  # type: ignore[arg-type]
        for request_id in range(20):
            driver.add(request_id, prompt(4, seed=request_id))
            driver.step({request_id: 4})
            driver.finish(request_id)
        assert tokens.num_waiting <= 4


def test_the_times_of_a_step_are_those_of_all_stages(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", **SIZES)
    with staged(tmp_path, 3) as pipeline:
        driver = Driver(pipeline, 64)  # type: ignore[arg-type]
        driver.add(0, prompt(5))
        output: Any = driver.launch({0: 5})
        driver.collect(output)
        times = output.times
    assert len(times.busy) == len(times.waited) == 3 and min(times.busy) > 0


def test_a_stage_has_its_weights_alone(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", **SIZES | {"tie_word_embeddings": False})
    whole = load(tmp_path)
    stages = [load(tmp_path, stage=Stage(index, 3)) for index in range(3)]
    assert sum(stage.weight_bytes for stage in stages) == whole.weight_bytes
    names = [set(targets(stage)) for stage in stages]
    assert set().union(*names) == set(targets(whole)) and sum(map(len, names)) == len(targets(whole))
    assert "model.embed_tokens.weight" in names[0] and "lm_head.weight" in names[2]


def targets(model: Model) -> dict[str, torch.Tensor]:
    assert isinstance(model, CausalModel)
    return model.load_targets()


@pytest.mark.slow
def test_the_default_model_in_stages(smollm2_gguf: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 96}
    whole = load(smollm2_gguf, **options)
    driver = make_driver(whole)
    driver.add(0, prompt(9), GREEDY)
    expected = driver.generate(0, 10, first=9)
    with staged(smollm2_gguf, 3, **options) as pipeline:
        staged_driver = Driver(pipeline, 64)  # type: ignore[arg-type]
        staged_driver.add(0, prompt(9), GREEDY)
        assert staged_driver.generate(0, 10, first=9) == expected


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    """The head costs as much as eight layers of the default model: the last stage has so many fewer."""
    stages = divide([1.0] * 30, 8.0, 2)
    assert [len(stage.layers(30)) for stage in stages] == [19, 11]
    assert [len(stage.layers(6)) for stage in divide([1.0] * 6, 100.0, 3)][-1] == 1
    costs = [1.0, 1.0, 5.0, 1.0, 1.0]
    assert [list(stage.layers(5)) for stage in divide(costs, 0.0, 3)] == [[0, 1], [2], [3, 4]]


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", **SIZES)
    with pytest.raises(ModelLoadError, match="--pipeline-parallel-size 7: the model has 6 layers"):
        load(tmp_path, stage=Stage(0, 7))


def test_a_model_in_transformers_code_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", **SIZES)
    with pytest.raises(ModelLoadError, match="runs in transformers' code, which is not divided"):
        load(tmp_path, stage=Stage(0, 2), model_impl="transformers")
