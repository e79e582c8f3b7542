"""Steps with drafts and vectors as the scheduler sends them, and what it gets back."""

from __future__ import annotations

import numpy as np
import pytest

from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.runner.executor_info import DecodeCosts, DraftMethod, ExecutorInfo
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.service.convert import (
    describe_response,
    first_weights,
    result_to_proto,
    step_from_proto,
)
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.step.step import InvalidStep
from pagewire.services.scheduler.service.convert import to_executor_info
from pagewire.v1.common_pb2 import SamplingParams
from pagewire.v1.executor_pb2 import Blocks, NewRequest, StepRequest, StepResult
from tests.services.executor.helpers.drafting import KnownTexts
from tests.services.executor.helpers.stepping import CPU, LIMITS, alone, prompt, tiny_llama

LOGPROBS = SamplingParams(temperature=0, logprobs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


def run(runner: ModelRunner, message: StepRequest) -> StepResult:
    output = runner.execute(step_from_proto(message))
    return result_to_proto(output, output.wait(), execute_ns=1, queue_ns=2, idle_ns=None)


def new_request(request_id: int, token_ids: list[int], params: SamplingParams | None = None) -> NewRequest:
    """Returns a request with blocks for 40 tokens. No parameters: it yields a vector."""
    return NewRequest(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        blocks=[Blocks(ids=range(5 * request_id, 5 * request_id + 5))],
        sampling_params=params,
        yields_vector=params is None,
    )


def test_a_step_yields_tokens_log_probabilities_and_a_vector(model: DecoderModel) -> None:
    texts = [prompt(length, length) + alone(model, prompt(length, length), 12) for length in (5, 6)]
    runner = assemble(model, LIMITS, 40, CPU, proposer=KnownTexts(texts, 1.0))
    first = run(
        runner,
        StepRequest(
            step_id=1,
            new_requests=[new_request(1, texts[0][:5], LOGPROBS), new_request(2, texts[1][:6], LOGPROBS)],
            request_ids=[1, 2],
            num_scheduled_tokens=[5, 6],
            num_new_blocks=[0, 0],
        ),
    )
    assert (list(first.request_ids), list(first.num_tokens)) == ([1, 2], [1, 1])
    result = run(
        runner,
        StepRequest(
            step_id=2,
            new_requests=[new_request(3, prompt(9))],
            request_ids=[3, 2, 1],
            num_scheduled_tokens=[9, 4, 3],
            num_new_blocks=[0, 0, 0],
            num_draft_tokens=[0, 3, 2],
        ),
    )
    assert (list(result.request_ids), list(result.num_tokens)) == ([2, 1, 3], [4, 3, 0])
    assert list(result.token_ids) == texts[1][7:11] + texts[0][6:9]
    assert sorted(result.logprobs) == [0, 1] and sorted(result.vectors) == [2]
    for index, tokens in ((0, texts[1][7:11]), (1, texts[0][6:9])):
        logprobs = result.logprobs[index]
        assert logprobs.entries_per_token == 3 and list(logprobs.token_ids[::3]) == tokens
        assert list(logprobs.ranks) == [1] * len(tokens) and len(logprobs.logprobs) == 3 * len(tokens)
    vector = np.array(result.vectors[2].values)
    assert vector.shape == (model.config.hidden_size,) and np.isfinite(vector).all() and vector.any()


def test_a_vector_needs_no_seed() -> None:
    step = step_from_proto(StepRequest(step_id=1, new_requests=[new_request(1, [5, 6])]))
    assert step.new_requests[0].yields_vector
    with pytest.raises(InvalidStep, match="has no seed"):
        step_from_proto(StepRequest(step_id=1, new_requests=[new_request(1, [5, 6], SamplingParams())]))


def test_columns_that_are_not_parallel_are_refused() -> None:
    with pytest.raises(InvalidStep, match="num_draft_tokens are not parallel"):
        step_from_proto(
            StepRequest(
                step_id=4, request_ids=[1, 2], num_scheduled_tokens=[3, 1], num_new_blocks=[0, 0], num_draft_tokens=[2]
            )
        )


def test_describe_reports_how_much_is_drafted(model: DecoderModel) -> None:
    runner = assemble(model, LIMITS, 8, CPU, proposer=KnownTexts([], 1.0, max_draft_tokens=5))
    info = ExecutorInfo(1, "m", 96, 200, (2,), (), 8, 8, 128, "cpu", "float32", 1, 1, runner.max_draft_tokens)
    assert describe_response(info, first_weights(info)).max_draft_tokens == 5


def test_describe_reports_the_costs_of_drafts(model: DecoderModel) -> None:
    methods = DraftMethod("ngram", ((1, 0.125), (8, 0.25))), DraftMethod("self", comes_later=True)
    costs = DecodeCosts(((1, 0.5), (4, 0.75)), methods)
    info = ExecutorInfo(1, "m", 96, 200, (2,), (), 8, 8, 128, "cpu", "float32", 1, 1, 5, costs, ((8, 2), (16, 0)))
    reported = to_executor_info(describe_response(info, first_weights(info)))
    assert reported.decode_costs == costs.steps
    assert [(one.name, one.rounds, one.comes_later) for one in reported.draft_methods] == [
        ("ngram", ((1, 0.125), (8, 0.25)), False),
        ("self", (), True),
    ]
    assert reported.draft_bounds == info.draft_bounds
