"""Steps that are recorded on the CPU, while idle or when one of their shape occurs, and replayed from C++."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels.ops import cpu_backend
from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.step.limits import Limits
from pagewire.v1.common_pb2 import SamplingParams
from tests.services.executor.helpers.stepping import (
    CPU,
    GREEDY,
    LIMITS,
    MIXTRAL,
    MIXTRAL_4_BITS,
    SEEDED,
    VOCAB_SIZE,
    WITH_LOGPROBS,
    Driver,
    alone,
    check_random_steps,
    graph_steps,
    prompt,
    tiny_llama,
)
from tests.services.executor.models.tiny import load, save_tiny

if cpu_backend() != "cpp":
    pytest.skip("there is no C++ compiler: steps are not recorded", allow_module_level=True)

from pagewire.services.executor.graphs.recorded_steps import MOST_TOKENS, RecordedSteps
from tests.sweep import examples


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


def recorded_steps(limits: Limits = LIMITS, most_tokens: int = MOST_TOKENS) -> RecordedSteps:
    return RecordedSteps(limits.max_num_seqs, limits.max_num_batched_tokens, most_tokens=most_tokens)


def recorded_driver(model: Model, limits: Limits = LIMITS, most_tokens: int = MOST_TOKENS) -> Driver:
    """The KV cache holds NaN wherever no request has written."""
    runner = assemble(model, limits, 64, CPU, graphs=recorded_steps(limits, most_tokens))
    for layer in model.attention_layers:
        layer.kv_cache.fill_(float("nan"))
    return Driver(runner, 64)


@given(st.data())
@settings(max_examples=examples(12), deadline=None)
def test_recording_changes_no_token(model: DecoderModel, data: st.DataObject) -> None:
    """Requests that come, decode in every number and order, and leave: recorded, replayed and eager steps mix, and
    steps with prompts are padded."""
    driver = recorded_driver(model, most_tokens=data.draw(st.integers(0, LIMITS.max_num_batched_tokens)))
    check_random_steps(model, driver, data.draw(st.integers(0, 2**32)))


EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16}
WINDOW: dict[str, Any] = {"head_dim": 16, "sliding_window": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "GptOss": WINDOW | {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 5, "num_experts_per_tok": 3},
    "Gemma2": WINDOW,
    "Gemma3Text": WINDOW,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Path, family: str) -> None:
    """Experts are chosen anew in each replay, windows move on, and the tokens are those of steps that run eagerly. The
    recordings are of empty steps, and most decode steps are padded."""
    save_tiny(tmp_path, family, **FAMILIES[family], vocab_size=VOCAB_SIZE, max_position_embeddings=96)
    model = load(tmp_path)
    steps = RecordedSteps(LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens, requests=(2, 5))
    runner = assemble(model, LIMITS, 64, CPU, graphs=steps)
    for layer in model.attention_layers:
        layer.kv_cache.fill_(float("nan"))
    while runner.record_missing():
        pass
    before = modes()
    check_random_steps(model, Driver(runner, 64), 7)
    captured, replayed, _ = modes()
    assert captured == before[0] and replayed > before[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [MIXTRAL, MIXTRAL_4_BITS], ids=["dense", "4 bits"])
def test_experts_in_every_form(tmp_path: Path, config: dict[str, Any], dtype: str) -> None:
    """Decode steps, recorded as they are, round as eager ones do."""
    model = tiny_llama(tmp_path, dtype=dtype, **config)
    before, tokens = graph_steps("replayed"), []
    for graphs in (None, recorded_steps(most_tokens=0)):
        driver = Driver(assemble(model, LIMITS, 64, CPU, graphs=graphs), 64)
        for request_id in range(3):
            driver.add(request_id, prompt(9 + request_id, seed=request_id))
        driver.step({0: 9, 1: 10, 2: 11})
        for _ in range(12):
            driver.step(dict.fromkeys(range(3), 1))
        tokens.append(driver.tokens)
    assert tokens[0] == tokens[1]
    assert graph_steps("replayed") == before + 11


@pytest.mark.parametrize("family", ["StableLm", "Gemma", "Phimoe"])
@pytest.mark.few("Phimoe")
def test_models_in_transformers_code(tmp_path: Path, family: str) -> None:
    """Nothing in their steps depends on what Python sees, either."""
    save_tiny(tmp_path, family, vocab_size=200, max_position_embeddings=96, head_dim=8)
    model = load(tmp_path, model_impl="transformers")
    runner = assemble(model, LIMITS, 64, CPU, graphs=recorded_steps(most_tokens=16))
    before = graph_steps("replayed")
    check_random_steps(model, Driver(runner, 64), 7)
    assert graph_steps("replayed") > before


def test_which_steps_are_replayed(model: DecoderModel) -> None:
    driver = recorded_driver(model, most_tokens=16)
    for request_id in range(4):
        driver.add(request_id, prompt(8 if request_id < 3 else 12, seed=request_id))
    before = {mode: graph_steps(mode) for mode in ("captured", "replayed", "eager")}
    driver.step({0: 8, 1: 8, 2: 8, 3: 8})  # too large
    driver.step({0: 1, 1: 1, 2: 1, 3: 2})  # no decode step: as if it had 8 tokens
    driver.step({0: 1, 1: 1, 2: 1, 3: 2})
    driver.step(dict.fromkeys(range(4), 1))
    driver.step(dict.fromkeys(range(3), 1))
    driver.step(dict.fromkeys((3, 1, 0), 1))
    driver.step(dict.fromkeys(range(2), 1))
    assert {mode: graph_steps(mode) - before[mode] for mode in before} == {"captured": 4, "replayed": 2, "eager": 1}


@given(st.lists(st.integers(2, 24), min_size=1, max_size=5))
@settings(max_examples=examples(20), deadline=None)
def test_prompts_of_other_lengths_run_as_the_same_recording(model: DecoderModel, lengths: list[int]) -> None:
    """Steps split over any requests, and with a request that decodes beside them."""
    driver = recorded_driver(model)
    driver.add(0, prompt(3))
    driver.step({0: 3})
    before = {mode: graph_steps(mode) for mode in ("captured", "replayed")}
    padded = set()
    for request_id, length in enumerate(lengths, 1):
        driver.add(request_id, prompt(length, seed=request_id))
        driver.step({request_id: length, 0: 1})
        padded.add(-(-(length + 1) // 8))
    assert {mode: graph_steps(mode) - before[mode] for mode in before} == {
        "captured": len(padded - {1}),  # the first step had 8 tokens too
        "replayed": len(lengths) - len(padded - {1}),
    }
    for request_id, length in enumerate(lengths, 1):
        assert driver.tokens[request_id] == alone(model, prompt(length, seed=request_id), 1)
    assert driver.tokens[0] == alone(model, prompt(3), 1 + len(lengths))


MANY = replace(LIMITS, max_num_seqs=21)  # up to 16 requests, 18, 20 and 21


def modes() -> tuple[float, ...]:
    return tuple(graph_steps(mode) for mode in ("captured", "replayed", "eager"))


def check_tokens(model: Model, driver: Driver, samplings: list[SamplingParams]) -> None:
    """Returns the outputs of requests with a prompt of 5 tokens each, as if each were alone."""
    for request_id, sampling in enumerate(samplings):
        tokens = driver.tokens[request_id]
        assert tokens == alone(model, prompt(5, seed=request_id), len(tokens), sampling), request_id


def test_numbers_of_requests_between_two_sizes_share_a_recording(model: DecoderModel) -> None:
    driver = recorded_driver(model, MANY)
    samplings = [(GREEDY, SEEDED, WITH_LOGPROBS)[index % 3] for index in range(21)]
    for request_id, sampling in enumerate(samplings):
        driver.add(request_id, prompt(5, seed=request_id), sampling)
    driver.step(dict.fromkeys(range(21), 5))
    captured, replayed, eager = modes()
    for num_reqs in (17, 18, 19, 20, 21, 16, 17, 19):
        driver.step(dict.fromkeys(range(21 - num_reqs, 21), 1))
    assert modes() == (captured + 4, replayed + 4, eager)
    check_tokens(model, driver, samplings)


def test_steps_recorded_while_idle_are_replayed_at_once(model: DecoderModel) -> None:
    """Recording changes nothing for a request with a row: neither its tokens nor the KV cache."""
    limits = replace(LIMITS, max_num_seqs=18, max_num_batched_tokens=48)
    driver = recorded_driver(model, limits)
    driver.add(0, prompt(5))
    driver.step({0: 5})
    caches = [cache.clone() for cache in driver.runner.kv_caches]
    before, num_recorded = modes(), 0
    while driver.runner.record_missing():
        num_recorded += 1
    assert num_recorded == 17 + 6 - 1, "17 numbers of requests; 6 of tokens, of which there was one"
    assert modes() == before, "these are no steps"
    assert all(map(equal_bits, caches, driver.runner.kv_caches))
    samplings = [(GREEDY, SEEDED)[index % 2] for index in range(18)]
    for request_id in range(1, 18):
        driver.add(request_id, prompt(5, seed=request_id), samplings[request_id])
        driver.step(dict.fromkeys(range(request_id), 1) | {request_id: 5})
        driver.step(dict.fromkeys(range(request_id + 1), 1))
    captured, replayed, eager = modes()
    assert (captured, replayed, eager) == (before[0], before[1] + 34, before[2])
    check_tokens(model, driver, samplings)


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """NaN included."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_a_model_for_vectors_has_no_decode_steps_to_record() -> None:
    steps = RecordedSteps(16, 20, requests=())
    assert steps.missing() == steps.padded(BatchShape(1, 3, 0, 3))


def test_the_number_of_recordings_is_bounded() -> None:
    """Whatever occurs."""
    steps = RecordedSteps(2048, 8192)
    padded = {size: steps.padded(BatchShape.uniform(size)).num_reqs for size in range(1, 513)}
    assert len(set(padded.values())) < 60
    assert all(size <= larger <= 1.125 * size for size, larger in padded.items())
    assert steps.padded(BatchShape.uniform(513)) == BatchShape.uniform(513), "runs eagerly"


def test_drafts_add_few_recordings() -> None:
    """Drafts are divided among requests in any way."""
    steps = RecordedSteps(64, 2048, max_draft_tokens=7)
    shapes = [BatchShape(n, n + drafts, n + drafts, 8) for n in range(1, 65) for drafts in range(1, 7 * n + 1)]
    shapes += [BatchShape.uniform(n, query_len) for n in range(1, 65) for query_len in range(2, 9)]
    padded = {shape: steps.padded(shape) for shape in shapes}
    assert len({(shape.num_reqs, shape.num_tokens) for shape in padded.values()}) < 7 + 28 + 12
    assert all(shape.num_tokens <= larger.num_tokens for shape, larger in padded.items())


def test_steps_of_many_tokens_run_eagerly(model: DecoderModel) -> None:
    """Includes steps that would be padded beyond the most tokens of a step."""
    limits = replace(LIMITS, max_num_batched_tokens=20)
    driver = Driver(assemble(model, limits, 64, CPU, graphs=recorded_steps(limits)), 64)
    driver.add(0, prompt(40))
    before = {mode: graph_steps(mode) for mode in ("captured", "replayed", "eager")}
    driver.step({0: 20})
    driver.step({0: 20})
    assert {mode: graph_steps(mode) - before[mode] for mode in before} == {"captured": 0, "replayed": 0, "eager": 2}
    assert driver.tokens[0] == alone(model, prompt(40), 1)


def test_what_cannot_be_recorded_runs_eagerly(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that branches on a number it computed."""
    forward = model.forward

    def branching(*args: Any) -> Tensor:
        hidden = forward(*args)
        return hidden if hidden.float().sum().item() > 0 else hidden * 1

    driver = recorded_driver(model)
    monkeypatch.setattr(model, "forward", branching)
    driver.add(0, prompt(5))
    before = graph_steps("replayed"), graph_steps("eager")
    driver.step({0: 5})
    for _ in range(4):
        driver.step({0: 1})
    monkeypatch.undo()
    assert driver.tokens[0] == alone(model, prompt(5), 5, GREEDY)
    assert graph_steps("replayed") >= before[0]


@pytest.mark.parametrize("quantization", [None, "none"], ids=["4 bits", "bf16"])
def test_steps_of_the_default_model_are_replayed(smollm2_gguf: Path, quantization: str | None) -> None:
    """Nothing in them depends on what Python sees, and replays give the tokens of eager steps."""
    model = load_model(smollm2_gguf, dtype="bfloat16", device=CPU, max_model_len=128, quantization=quantization)
    before, tokens = graph_steps("replayed"), []
    for graphs in (None, recorded_steps()):
        driver = Driver(assemble(model, LIMITS, 64, CPU, graphs=graphs), 64)
        for request_id in range(3):
            driver.add(request_id, prompt(9 + request_id, seed=request_id))
        driver.step({0: 9, 1: 10, 2: 11})
        for _ in range(5):
            driver.step(dict.fromkeys(range(3), 1))
        tokens.append(driver.tokens)
    assert tokens[0] == tokens[1]
    assert graph_steps("replayed") == before + 4
