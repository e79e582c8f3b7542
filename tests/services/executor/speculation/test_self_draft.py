"""Drafts of a copy of the model in fewer bits: the text is that of plain decoding, in fewer steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.config.values import drafts
from pagewire.errors import StartupError
from pagewire.kernels.ops import cpu_backend
from pagewire.kernels.quantized import PackedGrouped
from pagewire.services.executor.graphs.cuda_graphs import CudaGraphs, Steps
from pagewire.services.executor.loading.twins import twins
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.speculation import quantized_copy as of_copy
from pagewire.services.executor.speculation.draft_steps import Target
from pagewire.services.executor.speculation.drafters import own_bytes
from pagewire.services.executor.speculation.ngram import NgramProposer
from pagewire.services.executor.speculation.quantized_copy import quantized_copy, saved_bytes, shared_copy
from pagewire.services.executor.speculation.self_draft import IdleSelfDraft, SelfDraft
from pagewire.services.executor.speculation.several import SeveralProposers
from pagewire.services.executor.step.step import Step, StepOutput
from pagewire.v1.common_pb2 import SamplingParams
from tests.services.executor.helpers.stepping import (
    BLOCK_SIZE,
    CPU,
    GREEDY,
    LIMITS,
    MIXTRAL,
    PENALIZED,
    SEEDED,
    WITH_LOGPROBS,
    Driver,
    alone,
    make_driver,
    prompt,
    tiny_llama,
)

KINDS = [GREEDY, SEEDED, PENALIZED, WITH_LOGPROBS]
NUM_DRAFTS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="module", params=["eager", "recorded"])
def target(request: pytest.FixtureRequest, model: DecoderModel) -> Iterator[Target]:
    def recorded() -> Steps:
        from pagewire.services.executor.graphs.recorded_steps import RecordedSteps

        return RecordedSteps(LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens)

    if request.param == "recorded" and cpu_backend() != "cpp":
        pytest.skip("there is no C++ compiler: steps are not recorded")
    yield Target(model, LIMITS, 64, CPU, steps=CudaGraphs if request.param == "eager" else recorded)


def drafting_driver(target: Target) -> Driver:
    assert isinstance(target.model, DecoderModel)
    return make_driver(target.model, proposer=SelfDraft(target, quantized_copy(target.model, 4), 4, NUM_DRAFTS))


def num_steps(driver: Driver, num_tokens: int) -> int:
    """Steps with drafts that request 0 takes to have so many tokens."""
    steps = 0
    while len(driver.tokens[0]) < num_tokens:
        driver.step({0: 1 + NUM_DRAFTS}, {0: NUM_DRAFTS})
        steps += 1
    return steps


@pytest.mark.parametrize(("kind", "steps"), [(GREEDY, 20), (SEEDED, 26)], ids=["greedy", "sampled"])
def test_most_drafts_are_right(model: DecoderModel, target: Target, kind: SamplingParams, steps: int) -> None:
    """Sampled ones, too: the copy draws with the noise that the model will draw with."""
    driver = drafting_driver(target)
    driver.add(0, prompt(20, 1), kind)
    driver.step({0: 20})
    assert num_steps(driver, 40) <= steps
    assert driver.tokens[0][:40] == alone(model, prompt(20, 1), 40, kind)


def test_a_shared_prefix_stays_as_it_was(model: DecoderModel, target: Target) -> None:
    """The copy writes to the model's cache; requests that share full blocks read what the model has written."""
    driver = drafting_driver(target)
    driver.add(0, prompt(2 * BLOCK_SIZE + 1, 2))
    driver.step({0: 2 * BLOCK_SIZE + 1})
    num_steps(driver, BLOCK_SIZE)
    known = (prompt(2 * BLOCK_SIZE + 1, 2) + driver.tokens[0])[: 3 * BLOCK_SIZE + 1]
    driver.add(1, known, shared_blocks=driver.blocks(0)[:3])
    driver.step({1: 1, 0: 1 + NUM_DRAFTS}, {0: NUM_DRAFTS})
    assert driver.generate(1, 9, first=1) == alone(model, known, 9)


@given(st.integers(0, 2**32), st.integers(1, 3))
@settings(max_examples=8, deadline=None)
def test_texts_equal_plain_decoding(model: DecoderModel, target: Target, seed: int, depth: int) -> None:
    """Requests of all kinds come and decode with as many drafts as it happens, up to `depth` steps in flight."""
    rng = np.random.default_rng(seed)
    driver, outputs = drafting_driver(target), list[StepOutput]()
    for _ in range(14):
        scheduled, drafts = {}, {}
        if (entering := len(driver.tokens)) < LIMITS.max_num_seqs and rng.random() < 0.4:
            driver.add(entering, prompt(5 + entering, entering), KINDS[entering % len(KINDS)])
            scheduled[entering], drafts[entering] = 5 + entering, 0
        for request_id in rng.permutation(list(driver.tokens)).tolist():
            if request_id not in scheduled and len(driver.tokens[request_id]) < 30 and rng.random() < 0.8:
                drafts[request_id] = int(rng.integers(0, NUM_DRAFTS + 1))
                scheduled[request_id] = 1 + drafts[request_id]
        if scheduled:
            outputs.append(driver.launch(scheduled, drafts))
        while len(outputs) >= depth:
            driver.collect(outputs.pop(0))
    for output in outputs:
        driver.collect(output)
    for request_id, tokens in driver.tokens.items():
        sampling = KINDS[request_id % len(KINDS)]
        assert tokens == alone(model, prompt(5 + request_id, request_id), len(tokens), sampling)[: len(tokens)]


class Choosing(SeveralProposers):
    """Chooses the method of each request at random, as any scheduler may; 2 names none of them."""

    rng = np.random.default_rng(7)

    def propose(self, step: Step, *others: Any) -> np.ndarray | None:
        return super().propose(replace(step, draft_methods=self.rng.integers(0, 3, len(step.request_ids))), *others)


@pytest.mark.parametrize("num_pieces", [0, 3, 1000])
def test_texts_are_those_of_plain_decoding_by_whatever_methods(model: DecoderModel, num_pieces: int) -> None:
    """Checks every stage of the copy: not begun, in part, complete."""
    target = Target(model, LIMITS, 64, CPU)
    lookup, copy = NgramProposer(NUM_DRAFTS, 3, 1), IdleSelfDraft(target, shared_copy(model), 4, NUM_DRAFTS)
    driver = make_driver(model, proposer=Choosing([lookup, copy]))
    for _ in range(num_pieces):
        if not driver.runner.record_missing():
            break
    for request_id, kind in enumerate(KINDS):
        driver.add(request_id, prompt(12, request_id), kind)
        driver.step({request_id: 12})
    for _ in range(8):
        driver.step(dict.fromkeys(driver.tokens, 1 + NUM_DRAFTS), dict.fromkeys(driver.tokens, NUM_DRAFTS))
    for request_id, tokens in driver.tokens.items():
        assert tokens == alone(model, prompt(12, request_id), len(tokens), KINDS[request_id])


def prepared(proposer: IdleSelfDraft) -> IdleSelfDraft:
    while proposer.prepare():
        pass
    return proposer


def test_a_copy_that_is_made_later_drafts_once_it_is_complete(tmp_path: Path) -> None:
    """Other weights make it incomplete again, and it keeps its memory, which recorded steps have the addresses of."""
    model = tiny_llama(tmp_path)
    copy = shared_copy(model)
    proposer = IdleSelfDraft(Target(model, LIMITS, 64, CPU), copy, 4, NUM_DRAFTS)
    driver = make_driver(model, proposer=proposer)
    driver.add(0, prompt(20, 1))
    driver.step({0: 20})
    assert num_steps(driver, 6) == 5 and not proposer.prefer(0), "a token each"
    prepared(proposer)
    assert proposer.prefer(0) and num_steps(driver, 26) < 12
    own = [part for module in copy.modules() for part in module.parts if isinstance(part, PackedGrouped)]
    places = [part.codes.data_ptr() for part in own]
    with torch.inference_mode():
        for module in model.modules():
            for part in module.parts:
                part.tensor.copy_(part.tensor.flip(0))  # type: ignore[attr-defined]
    driver.runner.on_other_weights()
    assert not proposer.prefer(0)
    prepared(proposer)
    assert [part.codes.data_ptr() for part in own] == places
    driver.add(1, prompt(20, 1))
    driver.step({1: 20})
    for _ in range(8):
        driver.step({1: 1 + NUM_DRAFTS}, {1: NUM_DRAFTS})
    assert len(driver.tokens[1]) > 14, "more than one for each step"
    assert driver.tokens[1][:14] == alone(model, prompt(20, 1), 14)


def test_the_memory_of_a_copy_is_foretold(model: DecoderModel) -> None:
    foretold, replaced = saved_bytes(model, 4)
    copy = quantized_copy(model, 4)
    assert foretold == pytest.approx(own_bytes(copy, model), rel=0.25)  # the tiny model's rows are padded to tiles
    assert replaced > foretold
    assert saved_bytes(copy, 4) == (0, 0)


def test_a_weight_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch, model: DecoderModel) -> None:
    whole = quantized_copy(model, 4)
    monkeypatch.setattr(of_copy, "_CHUNK", 1)
    pieces = quantized_copy(model, 4)
    assert all(torch.equal(one, other) for one, other in twins(whole, pieces))


def test_other_weights_are_rounded_anew(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    driver = drafting_driver(Target(model, LIMITS, 64, CPU))
    with torch.inference_mode():
        for module in model.modules():
            for part in module.parts:
                part.tensor.copy_(part.tensor.flip(0))  # type: ignore[attr-defined]
    driver.runner.on_other_weights()
    driver.add(0, prompt(20, 1))
    driver.step({0: 20})
    assert num_steps(driver, 40) <= 20
    assert driver.tokens[0][:40] == alone(model, prompt(20, 1), 40)


def test_experts_are_rounded_and_the_copy_shares_the_rest(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path, **MIXTRAL)
    copy = quantized_copy(model, 4)
    assert copy.weight_bytes < 0.5 * model.weight_bytes
    assert all(a is b for a, b in zip(model.caching_layers, copy.caching_layers, strict=True))
    shared = {tensor.data_ptr() for tensor in model.vectors().values()}
    assert {tensor.data_ptr() for tensor in copy.vectors().values()} == shared
    driver = make_driver(model, proposer=SelfDraft(Target(model, LIMITS, 64, CPU), copy, 4, NUM_DRAFTS))
    driver.add(0, prompt(20, 1))
    driver.step({0: 20})
    num_steps(driver, 12)
    assert driver.tokens[0][:12] == alone(model, prompt(20, 1), 12)


def test_refusals_name_the_remedy(model: DecoderModel) -> None:
    with pytest.raises(StartupError, match="'self:q5': a copy of the model itself is one of self:q4, self:q3"):
        drafts.bits_of("self:q5")
    with pytest.raises(StartupError, match=r"have 4 bits or less already.*use --spec-method ngram"):
        quantized_copy(quantized_copy(model, 4), 4)
