"""The real scheduler and model runner: whatever a request asks for, drafts change none of its tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.config.sampling_checks import resolve
from pagewire.services.executor.grammar.compiler import Compiler
from pagewire.services.executor.grammar.grammars import is_restricted
from pagewire.services.executor.grammar.matcher import GrammarMatcher
from pagewire.services.executor.grammar.thinking import ThinkingMatcher
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.matcher import Matcher
from pagewire.services.executor.step.step import NewRequest, Step
from pagewire.services.scheduler.values.request import Request
from pagewire.v1.common_pb2 import Grammar, SamplingParams, Thinking, TokenSequence
from tests.e2e.scale.test_kv_groups import Line
from tests.services.executor.helpers.constrained import (
    DIGITS,
    EOS,
    PERSON,
    VOCAB_SIZE,
    constrained_runner,
    save_constrained,
)
from tests.services.executor.helpers.drafting import KnownTexts
from tests.services.executor.helpers.stepping import CPU, prompt
from tests.sweep import examples

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=96, block_size=4)
NUM_BLOCKS = 24  # of which four requests would take 60
SHARED = prompt(40)  # what prompts begin with

tokens = st.integers(0, VOCAB_SIZE - 1)
sequences = st.lists(tokens, min_size=1, max_size=2).map(lambda ids: TokenSequence(token_ids=ids))
biases = st.dictionaries(tokens, st.floats(-3, 3, width=16), max_size=3)
grammars = st.sampled_from(
    [Grammar(json_schema=json.dumps(PERSON), disable_any_whitespace=True), Grammar(regex=DIGITS)]
)
thinking = st.builds(
    Thinking,
    start=st.just(TokenSequence(token_ids=[5, 6])),
    end=st.just(TokenSequence(token_ids=[7, 8, 7, 9])),
    begun=st.just(True),
    budget=st.integers(0, 12),
)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    """Any combination; most requests have two or three of them."""
    some = {
        "top_k": st.integers(1, 30),
        "top_p": st.floats(0.3, 1.0),
        "min_p": st.floats(0, 0.2),
        "repetition_penalty": st.floats(0.8, 1.5),
        "presence_penalty": st.floats(-1, 1),
        "frequency_penalty": st.floats(-1, 1),
        "min_tokens": st.integers(1, 12),
        "logprobs": st.integers(0, 3),
        "stop_token_ids": st.lists(tokens, min_size=1, max_size=40),
        "bad_words": st.lists(sequences, min_size=1, max_size=3),
        "allowed_token_ids": st.just(range(1, 60)),
        "ignore_eos": st.just(True),
        "grammar": grammars,
        "thinking": thinking,
    }
    asked = draw(st.sets(st.sampled_from(list(some)), max_size=4))
    if {"allowed_token_ids", "thinking"} <= asked:
        asked.remove("allowed_token_ids")
    fields: dict[str, Any] = {name: draw(some[name]) for name in sorted(asked)}
    bias, max_tokens = draw(biases), draw(st.integers(12, 40))
    if "min_tokens" in fields:
        fields["min_tokens"] = min(fields["min_tokens"], max_tokens)
    return resolve(
        SamplingParams(
            temperature=draw(st.sampled_from([0.0, 0.7, 1.2])),
            seed=draw(st.integers(0, 99)),
            max_tokens=max_tokens,
            logit_bias_ids=bias.keys(),
            logit_bias_values=bias.values(),
            **fields,
        )
    )


@dataclass(frozen=True)
class Runners:
    """Model runners of the same weights, with drafts and without."""

    plain: ModelRunner
    drafting: ModelRunner
    proposer: KnownTexts
    compiler: Compiler

    def line(self, runner: ModelRunner) -> Line:
        runner.reset()
        return Line(runner, self._with_matchers)

    def _with_matchers(self, step: Step) -> Step:
        return replace(step, new_requests=[self._with_matcher(request) for request in step.new_requests])

    def _with_matcher(self, request: NewRequest) -> NewRequest:
        params, matcher = request.sampling, None
        if is_restricted(params):
            if params.HasField("grammar"):
                matcher: Matcher | None = GrammarMatcher(self.compiler.compile(params.grammar), params, [EOS])
            if params.HasField("thinking"):
                matcher = ThinkingMatcher(params, matcher, [EOS], VOCAB_SIZE)
            matcher.advance(request.token_ids[request.num_prompt_tokens :].tolist())
        return replace(request, matcher=matcher)


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Runners:
    path = tmp_path_factory.mktemp("drafts")
    save_constrained(path)
    proposer = KnownTexts([], 0.0, 4)
    models = [constrained_runner(path)[0].model for _ in range(2)]
    plain = assemble(models[0], LIMITS, 400, CPU)
    drafting = assemble(models[1], LIMITS, NUM_BLOCKS, CPU, proposer=proposer)
    return Runners(plain, drafting, proposer, Compiler(path, VOCAB_SIZE, [EOS]))


def lines_of(line: Line) -> dict[int, tuple[list[int], list[int], list[float]]]:
    """Returns, by request, the tokens that log probabilities name, ranks, and the log probabilities."""
    return {
        request_id: (
            [id for part in parts for id in part.token_ids],
            [rank for part in parts for rank in part.ranks],
            [value for part in parts for value in part.logprobs],
        )
        for request_id, parts in line.logprobs.items()
    }


@given(
    st.lists(st.tuples(st.integers(1, 40), samplings()), min_size=3, max_size=6),
    st.sampled_from([0.0, 0.6, 1.0]),
    st.sets(st.integers(2, 40), max_size=2),
    st.integers(0, 2**32),
)
@settings(max_examples=examples(40), deadline=None)
def test_tokens_and_log_probabilities_are_those_without_drafts(
    runners: Runners, asked: list[tuple[int, SamplingParams]], accuracy: float, deaths: set[int], seed: int
) -> None:
    """Requests of any parameters, with prompts that begin alike and are computed in pieces, over so few blocks that
    some are preempted, by an executor that dies."""
    prompts = [[*SHARED[:length], 10 + index] for index, (length, _) in enumerate(asked)]

    def requests() -> Sequence[Request]:
        return [Request(100 + i, ids, params) for i, (ids, (_, params)) in enumerate(zip(prompts, asked, strict=True))]

    plain = runners.line(runners.plain)
    expected = plain.run(requests())
    runners.proposer.texts = [ids + output for ids, output in zip(prompts, expected, strict=True)]
    runners.proposer.accuracy, runners.proposer.random = accuracy, np.random.default_rng(seed)
    drafting = runners.line(runners.drafting)
    actual = drafting.run(requests(), lambda step, _: drafting.die() if step in deaths else None)
    assert actual == expected
    of_plain = lines_of(plain)
    assert lines_of(drafting).keys() == of_plain.keys()
    for request_id, (ids, ranks, values) in lines_of(drafting).items():
        assert (ids, ranks) == of_plain[request_id][:2]
        np.testing.assert_allclose(values, of_plain[request_id][2], atol=1e-4)
