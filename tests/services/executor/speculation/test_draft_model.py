"""Drafts of another model: with the target's own weights all of them are right, whatever it has computed when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.config import ExecutorConfig
from pagewire.config.speculation import Speculation
from pagewire.errors import StartupError
from pagewire.kernels.ops import cpu_backend
from pagewire.services.executor.batch import kv_cache
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.parallel.group import ALONE_GROUP
from pagewire.services.executor.speculation import draft_cache
from pagewire.services.executor.speculation.draft_model import CATCH_UP, DraftModel
from pagewire.services.executor.speculation.draft_steps import Target
from pagewire.services.executor.speculation.drafters import load_drafter
from pagewire.services.executor.start.startup import start_runner
from pagewire.services.executor.step.step import StepOutput
from tests.services.executor.helpers.stepping import (
    BLOCK_SIZE,
    CPU,
    GREEDY,
    LIMITS,
    PENALIZED,
    SEEDED,
    Driver,
    alone,
    make_driver,
    prompt,
    tiny_llama,
    write_tiny_llama,
)
from tests.sweep import examples

NUM_DRAFTS = 4
WINDOWS: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    """Makes a draft model with the same weights."""
    return tiny_llama(tmp_path_factory.mktemp("twin"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    """Makes a draft model of another shape, with nothing in common but the vocabulary."""
    return tiny_llama(tmp_path_factory.mktemp("small"), hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


def drafting_driver(model: DecoderModel, drafter: DecoderModel, max_len: int = LIMITS.max_model_len) -> Driver:
    proposer = DraftModel(Target(model, LIMITS, 64, CPU), drafter, NUM_DRAFTS, max_len)
    return make_driver(model, proposer=proposer)


def gained(driver: Driver, request_id: int = 0, num_drafts: int = NUM_DRAFTS) -> int:
    """Runs requests in one step with drafts."""
    return int(driver.step({request_id: 1 + num_drafts}, {request_id: num_drafts}).num_tokens[0])


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "sampled"])
def test_a_twin_is_always_right(model: DecoderModel, twin: DecoderModel, sampling: object) -> None:
    """Behind a prompt in chunks, after steps in which nothing is drafted, and when all drafts were right before."""
    driver = drafting_driver(model, twin)
    driver.add(0, prompt(20, 1), sampling)  # type: ignore[arg-type]
    driver.step({0: 13})
    driver.step({0: 7})
    assert [gained(driver) for _ in range(3)] == [1 + NUM_DRAFTS] * 3
    for _ in range(5):
        driver.step({0: 1})
    assert [gained(driver) for _ in range(2)] == [1 + NUM_DRAFTS] * 2
    for _ in range(CATCH_UP // 8 * 8 // 4):
        driver.step({0: 1})
    assert gained(driver) == 1 + NUM_DRAFTS
    tokens = driver.tokens[0]
    assert tokens == alone(model, prompt(20, 1), len(tokens), sampling)  # type: ignore[arg-type]


def test_blocks_of_others_are_read_or_filled(model: DecoderModel, twin: DecoderModel) -> None:
    """The second request finds the blocks of the first: of its prompt, and of output for which nothing was drafted."""
    driver = drafting_driver(model, twin)
    driver.add(0, prompt(2 * BLOCK_SIZE + 1, 2))
    driver.step({0: 2 * BLOCK_SIZE + 1})
    while len(driver.tokens[0]) < BLOCK_SIZE + 1:
        driver.step({0: 1})
    known = (prompt(2 * BLOCK_SIZE + 1, 2) + driver.tokens[0])[: 3 * BLOCK_SIZE + 1]
    driver.add(1, known, shared_blocks=driver.finish(0)[:3])
    driver.step({1: 1})
    assert gained(driver, 1) == 1 + NUM_DRAFTS
    assert driver.tokens[1] == alone(model, known, 2 + NUM_DRAFTS)


def test_a_window_of_the_target_does_not_matter(tmp_path: Path, twin: DecoderModel) -> None:
    """The drafter keeps all tokens and the target the last ones alone: there is no place for it."""
    model = tiny_llama(tmp_path, **WINDOWS)
    with pytest.raises(StartupError, match="one keeps something of tokens that the other forgets"):
        drafting_driver(model, twin)
    same = tiny_llama(tmp_path, **WINDOWS)
    driver = drafting_driver(model, same)
    driver.add(0, prompt(20, 1))
    driver.step({0: 20})
    assert [gained(driver) for _ in range(4)] == [1 + NUM_DRAFTS] * 4


def test_no_drafts_beyond_what_the_drafter_can_read(model: DecoderModel, twin: DecoderModel) -> None:
    driver = drafting_driver(model, twin, max_len=24)
    driver.add(0, prompt(18, 1))
    driver.step({0: 18})
    assert [gained(driver) for _ in range(3)] == [1 + NUM_DRAFTS, 1, 1]
    assert driver.tokens[0] == alone(model, prompt(18, 1), len(driver.tokens[0]))


@given(st.integers(0, 2**32), st.integers(1, 3))
@settings(max_examples=examples(12), deadline=None)
def test_texts_equal_plain_decoding(
    model: DecoderModel, twin: DecoderModel, small: DecoderModel, seed: int, depth: int
) -> None:
    """Requests come, decode with as many drafts as it happens, are preempted and resumed, with up to `depth` steps in
    flight. A twin's drafts are right unless penalties decide."""
    rng = np.random.default_rng(seed)
    kinds = [GREEDY, SEEDED, PENALIZED]
    drafter = twin if seed % 2 else small
    driver, outputs = drafting_driver(model, drafter), list[StepOutput]()

    def enter(request_id: int, output: list[int]) -> None:
        token_ids = prompt(5 + 7 * request_id, request_id)
        driver.add(request_id, token_ids + output, kinds[request_id % 3], num_prompt_tokens=len(token_ids))
        driver.tokens[request_id] = output
        scheduled[request_id], drafts[request_id] = len(token_ids) + len(output), 0

    for _ in range(14):
        scheduled: dict[int, int] = {}
        drafts: dict[int, int] = {}
        if (entering := len(driver.tokens)) < 6 and rng.random() < 0.5:
            enter(entering, [])
        elif driver.tokens and rng.random() < 0.2:
            while outputs:
                driver.collect(outputs.pop(0))
            request_id = int(rng.choice(list(driver.tokens)))
            driver.finish(request_id)
            enter(request_id, driver.tokens[request_id])
        for request_id in rng.permutation(list(driver.tokens)).tolist():
            if request_id not in scheduled and len(driver.tokens[request_id]) < 30 and rng.random() < 0.8:
                drafts[request_id] = int(rng.integers(0, NUM_DRAFTS + 1))
                scheduled[request_id] = 1 + drafts[request_id]
        if scheduled:
            outputs.append(driver.launch(scheduled, drafts))
            host = outputs[-1].wait()
            for index, request_id in enumerate(scheduled):
                if drafter is twin and request_id % 3 < 2:
                    assert host.num_tokens[index] == 1 + drafts[request_id]
        while len(outputs) >= depth:
            driver.collect(outputs.pop(0))
    for output in outputs:
        driver.collect(output)
    for request_id, tokens in driver.tokens.items():
        token_ids = prompt(5 + 7 * request_id, request_id)
        assert tokens == alone(model, token_ids, max(1, len(tokens)), kinds[request_id % 3])[: len(tokens)]


def test_its_cache_is_in_the_plan(model: DecoderModel, small: DecoderModel) -> None:
    proposer = DraftModel(Target(model, LIMITS, 64, CPU), small, NUM_DRAFTS, 96)
    num_bytes = draft_cache.num_bytes(small, model, 64, LIMITS)
    assert sum(cache.nbytes for cache in proposer.kv_caches) == num_bytes
    both = kv_cache.cache_bytes(model, 64, LIMITS) + num_bytes

    def bytes_of(num_blocks: int) -> int:
        of_drafter = draft_cache.num_bytes(small, model, num_blocks, LIMITS)
        return kv_cache.cache_bytes(model, num_blocks, LIMITS) + of_drafter

    assert kv_cache.blocks_within(both, model, LIMITS, "--flag", bytes_of) == 64
    assert kv_cache.blocks_within(both - 1, model, LIMITS, "--flag", bytes_of) == 63


@pytest.mark.parametrize("model_of", ["self:q4", "small"])
def test_its_bytes_are_reported(tmp_path: Path, model_of: str) -> None:
    """The bytes of a copy are those that are not the model's, too; both caches count."""
    path = write_tiny_llama(tmp_path / "target")
    drafter = model_of if model_of.startswith("self") else str(write_tiny_llama(tmp_path / "small", hidden_size=16))
    sizes: dict[str, Any] = {"dtype": "float32", "load_format": "dummy", "device": "cpu", "num_gpu_blocks_override": 8}
    config = ExecutorConfig(model=str(path), max_num_seqs=2, max_num_batched_tokens=16, block_size=BLOCK_SIZE, **sizes)
    _, plain = start_runner(replace(config, spec_method="none"), str(path), lambda fraction, text: None)
    runner, info = start_runner(replace(config, spec_model=drafter), str(path), lambda fraction, text: None)
    more = info.weight_bytes - plain.weight_bytes
    if model_of == "small":
        small = load_model(drafter, dtype="float32", device=CPU, load_format="dummy")
        assert more == small.weight_bytes
        assert info.kv_cache_bytes == plain.kv_cache_bytes + draft_cache.num_bytes(
            small, runner.model, 8, runner.limits
        )
    else:
        assert 0 < more < plain.weight_bytes / 2
        assert info.kv_cache_bytes == plain.kv_cache_bytes


@pytest.mark.skipif(cpu_backend() != "cpp", reason="there is no C++ compiler: steps are not recorded")
def test_its_steps_are_recorded_while_idle(model: DecoderModel, twin: DecoderModel) -> None:
    from pagewire.services.executor.graphs.recorded_steps import RecordedSteps

    made: list[RecordedSteps] = []

    def recorded() -> RecordedSteps:
        made.append(RecordedSteps(2, 16))
        return made[-1]

    limits = replace(LIMITS, max_num_seqs=2, max_num_batched_tokens=16)
    proposer = DraftModel(Target(model, limits, 16, CPU, steps=recorded), twin, 2, LIMITS.max_model_len)
    driver = make_driver(model, 16, limits, proposer)
    driver.runner.use_graphs(recorded())
    driver.add(0, prompt(5, 1))
    driver.step({0: 5})
    assert gained(driver, num_drafts=2) == 3
    while driver.runner.record_missing():
        pass
    assert len(made) == 2 and all(steps.missing() is None for steps in made)
    assert gained(driver, num_drafts=2) == 3
    assert driver.tokens[0] == alone(model, prompt(5, 1), len(driver.tokens[0]))


def test_another_vocabulary_is_refused(model: DecoderModel, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "other", vocab_size=210)
    speculation = Speculation("draft_model", model=str(path))
    config = ExecutorConfig(model="the target", load_format="dummy")
    with pytest.raises(ModelLoadError, match="this has 210 tokens, the target has 200"):
        load_drafter(speculation, config, model, LIMITS, CPU, ALONE_GROUP)
    assert load_model(path, device=CPU, load_format="dummy").config.vocab_size == 210
