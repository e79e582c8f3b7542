"""Drafts change how fast a text comes, and nothing of the text: by architecture, among ranks, and in distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.input_batch import InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.ranks.step_message import step_to_proto
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.service.convert import step_from_proto
from pagewire.services.executor.speculation.ngram import NgramProposer
from pagewire.services.executor.speculation.suffix import SuffixProposer
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.step import Step, StepOutput
from pagewire.v1.common_pb2 import SamplingParams
from tests.services.executor.helpers.staged import Staged, joined_runners
from tests.services.executor.helpers.stepping import (
    CPU,
    GREEDY,
    LIMITS,
    PENALIZED,
    SEEDED,
    WITH_LOGPROBS,
    Driver,
    alone,
    make_driver,
    sampling_params,
)
from tests.services.executor.models.tiny import load, save_tiny
from tests.services.executor.parallel.test_tensor_parallel import CASES

NUM_TOKENS = 20
TEXT = [5, 9, 11, 5, 9, 12, 30, 5, 9]  # much of it twice


def ngrams() -> Proposer:
    return NgramProposer(4, 3, 1)


def suffixes() -> Proposer:
    return SuffixProposer(4, max_depth=8, max_requests=4, factor=4.0, min_probability=0.1)


def generate(driver: Driver, samplings: list[SamplingParams]) -> list[list[int]]:
    """Runs all requests at the same time, with four drafts in each step."""
    for request_id, sampling in enumerate(samplings):
        driver.add(request_id, TEXT, sampling)
    driver.step(dict.fromkeys(range(len(samplings)), len(TEXT)))
    while running := [id for id, tokens in driver.tokens.items() if len(tokens) < NUM_TOKENS]:
        driver.step(dict.fromkeys(running, 5), dict.fromkeys(running, 4))
    return [tokens[:NUM_TOKENS] for tokens in driver.tokens.values()]


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3Text", "Mixtral", "GptOss", "DeepseekV2", "GPT2"])
def test_architectures(tmp_path: Path, family: str) -> None:
    """Makes models with all kinds of attention: windows, sinks, latent vectors; and of experts."""
    save_tiny(tmp_path, family, **next(changes for name, _, changes in CASES if name == family))
    model, samplings = load(tmp_path), [GREEDY, SEEDED, PENALIZED]
    expected = [alone(model, TEXT, NUM_TOKENS, sampling) for sampling in samplings]
    for make in (ngrams, suffixes):
        assert generate(make_driver(model, proposer=make()), samplings) == expected


@dataclass
class Follower:
    """A rank that receives steps as followers do, without what only sampling needs."""

    runner: ModelRunner

    @property
    def kv_groups(self) -> Any:
        return self.runner.kv_groups

    def execute(self, step: Step) -> StepOutput:
        output = self.runner.execute(step_from_proto(step_to_proto(step)))
        output.wait()
        return output


def _made(make: Callable[[], Proposer], *of_rank: Any) -> Proposer:
    return make()


def test_ranks_draft_the_same(tmp_path: Path) -> None:
    """Tests that only the leader samples, and each rank drafts for itself."""
    save_tiny(tmp_path, "Llama")
    samplings = [GREEDY, SEEDED, PENALIZED, WITH_LOGPROBS]
    expected = [alone(load(tmp_path), TEXT, NUM_TOKENS, sampling) for sampling in samplings]
    for make in (ngrams, suffixes):
        made = partial(_made, make)
        follower, leader = joined_runners(lambda group: load(tmp_path, tensor=group.tensor), 2, 1, LIMITS, 64, made)
        staged: Any = Staged([Follower(follower), leader])  # type: ignore[list-item]
        assert generate(Driver(staged, 64), samplings) == expected
        staged.stop()


@dataclass
class OneToken(Proposer):
    """Drafts the same token for every request."""

    token_id: int
    max_draft_tokens: int = 1

    def propose(self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables) -> None:
        for row in batch.sampled_rows.tolist():
            state.token_ids[row, int(state.columns.num_tokens[row])] = self.token_id


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """The probability that counts int64 [n], drawn with these probabilities [n], are as far from them, or farther."""
    expected = probabilities.double() * counts.sum()
    order = expected.argsort(descending=True)
    num_bins = int((expected >= 8).sum())
    actual, expected = counts[order].double(), expected[order]
    actual = torch.cat([actual[:num_bins], actual[num_bins:].sum()[None]])
    expected = torch.cat([expected[:num_bins], expected[num_bins:].sum()[None]])
    statistic = ((actual - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor(num_bins / 2).double(), statistic / 2))


@pytest.fixture(scope="module")
def default_model(smollm2_gguf: Path) -> Model:
    return load_model(smollm2_gguf, dtype="float32", device=CPU, max_model_len=64)


@pytest.mark.parametrize(
    "num_draws", [pytest.param(1_920), pytest.param(100_000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_the_distribution_is_the_models(default_model: Model, num_draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns the logits of a drafted position, and of the one behind it, where the draft was right."""
    text, draft, num_reqs = [504, 6376, 314], 260, 64  # "The sky is", " the"
    limits = Limits(num_reqs, 4 * num_reqs, 64, 8, 8)
    runner = assemble(default_model, limits, num_reqs, CPU, proposer=OneToken(draft))
    counts = torch.zeros(2, default_model.config.vocab_size, dtype=torch.int64)
    probabilities = steady_logits(default_model, runner, text, monkeypatch).softmax(-1)
    for start in range(0, num_draws, num_reqs):
        runner.reset()
        driver = Driver(runner, num_reqs)
        for index in range(num_reqs):
            driver.add(index, text, sampling_params(temperature=1.0, seed=start + index))
        driver.step(dict.fromkeys(range(num_reqs), 4), dict.fromkeys(range(num_reqs), 1))
        for tokens in driver.tokens.values():
            assert (len(tokens) == 2) == (tokens[0] == draft)
            for place, token_id in enumerate(tokens):
                counts[place, token_id] += 1
    assert counts[1].sum() > num_draws / 50, "the draft is right now and then"
    for place in range(2):
        assert chi_square(counts[place], probabilities[place]) > 1e-3


def steady_logits(model: Model, runner: ModelRunner, text: list[int], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """fp32 [2, vocab_size] behind a text and behind its draft. From now on the model has them for every request, and
    computes nothing."""
    computed, compute = list[Tensor](), model.compute_logits

    def compute_logits(hidden: Tensor) -> Tensor:
        computed.append(compute(hidden))
        return computed[-1]

    with monkeypatch.context() as patch:
        patch.setattr(model, "compute_logits", compute_logits)
        driver = Driver(runner, 8)
        driver.add(0, text)
        driver.step({0: len(text) + 1}, {0: 1})
    logits, size = computed[0].clone(), model.config.hidden_size
    monkeypatch.setattr(model, "forward", lambda input_ids, context: torch.zeros(len(input_ids), size))
    monkeypatch.setattr(model, "compute_logits", lambda hidden: logits.repeat(len(hidden) // 2, 1))
    return logits
