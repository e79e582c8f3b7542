"""Steps that check drafted tokens: whatever is offered, each request generates what it generates without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.ops import cpu_backend
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.start.graph_capture import capture_graphs
from pagewire.services.executor.step.step import InvalidStep, StepOutput
from tests.services.executor.graphs.test_cuda_graphs import ReplayedFunction
from tests.services.executor.helpers.drafting import KnownTexts
from tests.services.executor.helpers.stepping import (
    CPU,
    GREEDY,
    LIMITS,
    PENALIZED,
    RESTRICTED,
    SEEDED,
    WITH_LOGPROBS,
    Driver,
    alone,
    graph_steps,
    make_driver,
    prompt,
    sampling_params,
    tiny_llama,
)
from tests.sweep import examples

EOS = 2
# Its end is by far the most probable token, and forbidden for a while.
ENDING = sampling_params(seed=7, temperature=0.8, logit_bias=((EOS, 60.0),), min_tokens=9)
EVERYTHING = sampling_params(
    seed=13,
    temperature=0.7,
    top_k=30,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    logit_bias=((9, 2.0), (EOS, 20.0)),
    min_tokens=5,
    logprobs=3,
)
KINDS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalized": PENALIZED,
    "restricted": RESTRICTED,
    "ending": ENDING,
    "log probabilities": WITH_LOGPROBS,
    "everything": EVERYTHING,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="module")
def plain(model: DecoderModel) -> Callable[[str, int], list[int]]:
    """(kind, seed of the prompt) -> 48 tokens of plain decoding behind a prompt of 5 + seed tokens."""
    known: dict[tuple[str, int], list[int]] = {}

    def tokens(kind: str, seed: int) -> list[int]:
        if (kind, seed) not in known:
            known[kind, seed] = alone(model, prompt(5 + seed, seed), 48, KINDS[kind])
        return known[kind, seed]

    return tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("accuracy", "gained"), [(1.0, 4), (0.0, 1)], ids=["right", "wrong"])
def test_right_drafts_are_gained_and_wrong_ones_change_nothing(
    model: DecoderModel, plain: Callable[[str, int], list[int]], kind: str, accuracy: float, gained: int
) -> None:
    driver = make_driver(model, proposer=KnownTexts([prompt(8, 3) + plain(kind, 3)], accuracy))
    driver.add(0, prompt(8, 3), KINDS[kind])
    driver.step({0: 8})
    for _ in range(6):
        assert driver.step({0: 4}, {0: 3}).num_tokens.tolist() == [gained]
    assert driver.tokens[0] == plain(kind, 3)[: 1 + 6 * gained]


@pytest.mark.parametrize("kind", ["greedy", "everything"])
def test_drafts_behind_a_prompt(model: DecoderModel, plain: Callable[[str, int], list[int]], kind: str) -> None:
    """A prompt's last chunk is followed by drafts in the same step."""
    driver = make_driver(model, proposer=KnownTexts([prompt(25, 20) + plain(kind, 20)], 1.0))
    driver.add(0, prompt(25, 20), KINDS[kind])
    driver.step({0: 11})
    assert driver.step({0: 16}, {0: 2}).num_tokens.tolist() == [3]
    driver.step({0: 1})
    assert driver.tokens[0] == plain(kind, 20)[:4]


def eager_driver(model: DecoderModel, proposer: KnownTexts) -> Driver:
    return make_driver(model, proposer=proposer)


def recorded_driver(model: DecoderModel, proposer: KnownTexts) -> Driver:
    from pagewire.services.executor.graphs.recorded_steps import RecordedSteps

    limits = LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens
    graphs = RecordedSteps(*limits, max_draft_tokens=proposer.max_draft_tokens)
    return Driver(assemble(model, LIMITS, 64, CPU, graphs=graphs, proposer=proposer), 64)


def graph_driver(model: DecoderModel, proposer: KnownTexts) -> Driver:
    runner = assemble(model, LIMITS, 64, CPU, proposer=proposer)
    capture_graphs(runner, (1, 2, 4, 7), lambda fraction, text: None, ReplayedFunction, prompts=(8, 24, 64))
    return Driver(runner, 64)


NEEDS_COMPILER = pytest.mark.skipif(cpu_backend() != "cpp", reason="there is no C++ compiler: steps are not recorded")
DRIVERS = [
    pytest.param(eager_driver, id="eager", marks=pytest.mark.slow),
    pytest.param(graph_driver, id="graphs"),
    pytest.param(recorded_driver, id="recorded", marks=NEEDS_COMPILER),
]


@pytest.mark.parametrize("make", DRIVERS[1:])
def test_drafts_of_any_numbers_are_replayed(
    model: DecoderModel, plain: Callable[[str, int], list[int]], make: Callable[[DecoderModel, KnownTexts], Driver]
) -> None:
    """Drafts of any numbers, after shapes were recorded at start or while idle."""
    driver = make(model, KnownTexts([prompt(5 + seed, seed) + plain("greedy", seed) for seed in (0, 1)], 0.7))
    while driver.runner.record_missing():
        pass
    for request_id in (0, 1):
        driver.add(request_id, prompt(5 + request_id, request_id))
        driver.step({request_id: 5 + request_id})
    before = graph_steps("captured"), graph_steps("replayed"), graph_steps("eager")
    many = [({0: 1 + drafts}, {0: drafts}) for drafts in (3, 1, 0, 2)]
    many += [({0: 1 + one, 1: 1 + other}, {0: one, 1: other}) for one, other in ((3, 3), (2, 0), (1, 3), (2, 2))]
    for tokens, drafts in many:
        driver.step(tokens, drafts)
    assert (graph_steps("captured"), graph_steps("eager")) == (before[0], before[2])
    assert graph_steps("replayed") == before[1] + len(many)
    for request_id in (0, 1):
        output = driver.tokens[request_id]
        assert output == plain("greedy", request_id)[: len(output)]


@pytest.mark.parametrize("make", DRIVERS)
@given(st.integers(0, 2**32), st.sampled_from([0.3, 0.8, 1.0]), st.integers(1, 3))
@settings(max_examples=examples(20), deadline=None)
def test_text_equals_plain_decoding(
    model: DecoderModel,
    plain: Callable[[str, int], list[int]],
    make: Callable[[DecoderModel, KnownTexts], Driver],
    seed: int,
    accuracy: float,
    depth: int,
) -> None:
    """Requests of all kinds come, are prefilled in chunks, drafted for or not, preempted and resumed, while up to
    `depth` steps are in flight."""
    rng = np.random.default_rng(seed)
    kinds = list(KINDS)
    texts = [prompt(5 + index, index) + plain(kinds[index % len(kinds)], index) for index in range(12)]
    driver = make(model, KnownTexts(texts, accuracy, random=rng))
    unscheduled: dict[int, int] = {}  # tokens of the prompt, by request id
    outputs: list[StepOutput] = []

    def enter(request_id: int, output: list[int]) -> None:
        token_ids = prompt(5 + request_id, request_id)
        sampling = KINDS[kinds[request_id % len(kinds)]]
        driver.add(request_id, token_ids + output, sampling, num_prompt_tokens=len(token_ids))
        driver.tokens[request_id] = output
        unscheduled[request_id] = len(token_ids) + len(output)

    def preempt(request_id: int) -> None:
        """Restarts a request as the scheduler does: steps in flight are forgotten for this request."""
        while outputs:
            driver.collect(outputs.pop(0))
        output = driver.tokens[request_id]
        driver.finish(request_id)
        enter(request_id, output)

    for _ in range(24):
        if len(unscheduled) < min(LIMITS.max_num_seqs, len(texts)) and rng.random() < 0.4:
            enter(len(unscheduled), [])
        elif unscheduled and rng.random() < 0.15:
            started = [request_id for request_id, left in unscheduled.items() if left == 0]
            if started:
                preempt(int(rng.choice(started)))
        scheduled, drafts = {}, {}
        uniform = int(rng.integers(0, 4)) if rng.random() < 0.5 else None
        for request_id in rng.permutation(list(unscheduled)).tolist():
            left = unscheduled[request_id]
            if left:
                count = int(rng.integers(1, left + 1))
                unscheduled[request_id] -= count
                drafted = int(rng.integers(0, 3)) if count == left else 0
            elif len(driver.tokens[request_id]) > 30 or rng.random() < 0.2:
                continue
            else:
                count = 1
                drafted = int(rng.integers(0, 4)) if uniform is None else uniform
            scheduled[request_id], drafts[request_id] = count + drafted, drafted
        if scheduled:
            outputs.append(driver.launch(scheduled, drafts))
        while len(outputs) >= depth:
            driver.collect(outputs.pop(0))
    for output in outputs:
        driver.collect(output)
    for request_id, tokens in driver.tokens.items():
        assert tokens == plain(kinds[request_id % len(kinds)], request_id)[: len(tokens)], kinds[request_id % 6]


def test_steps_with_drafts_are_replayed_by_their_tokens(
    model: DecoderModel, plain: Callable[[str, int], list[int]]
) -> None:
    texts = [prompt(5 + seed, seed) + plain("greedy", seed) for seed in range(8)]
    before = graph_steps("captured")
    driver = graph_driver(model, KnownTexts(texts, 0.5))
    assert graph_steps("captured") == before + 4 + 6 + 5, "1 to 7 requests, 2 to 28 tokens with drafts, some of prompts"
    for request_id in range(8):
        driver.add(request_id, prompt(5 + request_id, request_id))
    driver.step({request_id: 5 + request_id for request_id in range(8)})
    replayed, eager = graph_steps("replayed"), graph_steps("eager")
    driver.step(dict.fromkeys(range(3), 4), dict.fromkeys(range(3), 3))  # padded to 16
    driver.step(dict.fromkeys(range(2), 3), dict.fromkeys(range(2), 2))
    driver.step({0: 4} | dict.fromkeys(range(1, 8), 1), {0: 3})  # more requests than are captured without
    assert (graph_steps("replayed"), graph_steps("eager")) == (replayed + 3, eager)
    driver.step(dict.fromkeys(range(8), 4), dict.fromkeys(range(8), 3))  # more than were captured
    assert (graph_steps("replayed"), graph_steps("eager")) == (replayed + 3, eager + 1)
    for request_id, tokens in driver.tokens.items():
        assert tokens == plain("greedy", request_id)[: len(tokens)]


def test_log_probabilities_are_those_of_the_gained_tokens(
    model: DecoderModel, plain: Callable[[str, int], list[int]]
) -> None:
    """Whatever was sampled behind a wrong draft is not reported. A request without them runs beside."""
    texts = [prompt(5 + seed, seed) + plain("everything", seed) for seed in range(2)]

    def lines(driver: Driver, drafts: int, num_steps: int) -> tuple[list[tuple[list[int], int]], list[np.ndarray]]:
        ids_and_ranks: list[tuple[list[int], int]] = []
        values: list[np.ndarray] = []
        driver.add(0, prompt(5, 0), PENALIZED)
        driver.add(1, prompt(6, 1), EVERYTHING)
        driver.step({0: 5, 1: 6})
        for _ in range(num_steps):
            host = driver.step(dict.fromkeys((0, 1), 1 + drafts), dict.fromkeys((0, 1), drafts))
            assert host.logprob_token_ids is not None and host.logprobs is not None and host.ranks is not None
            assert len(host.ranks) == host.num_tokens[1]
            ids_and_ranks += zip(host.logprob_token_ids.tolist(), host.ranks.tolist(), strict=True)
            values += list(host.logprobs)
        return ids_and_ranks, values

    expected, expected_values = lines(make_driver(model), 0, 32)
    actual, values = lines(make_driver(model, proposer=KnownTexts(texts, 0.6)), 3, 8)
    assert 8 < len(actual) < 32
    assert actual == expected[: len(actual)]
    np.testing.assert_allclose(values, expected_values[: len(actual)], atol=1e-4)


@pytest.mark.parametrize("successor", [0, 1], ids=["the same request", "another"])
def test_a_late_result_does_not_touch_the_next_request_of_its_row(
    model: DecoderModel, plain: Callable[[str, int], list[int]], successor: int
) -> None:
    """Drafts are refused after the row has gone to a request with min_tokens, which the host counts."""
    driver = make_driver(model, proposer=KnownTexts([], 0.0))
    driver.add(0, prompt(4))
    driver.step({0: 4})
    late = driver.launch({0: 4}, {0: 3})
    driver.finish(0)
    driver.add(successor, prompt(8, 3), ENDING)
    output = driver.launch({successor: 8})
    late.wait()
    driver.collect(output)
    while len(driver.tokens[successor]) < 16:
        driver.step({successor: 1})
    assert driver.tokens[successor] == plain("ending", 3)[:16]
    assert EOS not in plain("ending", 3)[:9] and set(plain("ending", 3)[9:16]) == {EOS}


def test_refused_drafts_leave_room_to_grow(model: DecoderModel) -> None:
    """Counts that drafts have raised are lowered when their result is there: the request still reaches its length."""
    driver = make_driver(model, proposer=KnownTexts([], 0.0))
    length = LIMITS.max_model_len - 8
    driver.add(0, prompt(length))
    driver.step({0: length})
    driver.launch({0: 4}, {0: 3})
    with pytest.raises(InvalidStep, match="max_model_len 96"):
        driver.launch({0: 4}, {0: 3})  # it may have 92 tokens, and gain five
    driver = make_driver(model, proposer=KnownTexts([], 0.0))
    driver.add(0, prompt(length))
    driver.step({0: length})
    for _ in range(4):
        driver.step({0: 4}, {0: 3})
    for _ in range(3):
        driver.step({0: 1})
    assert driver.tokens[0] == alone(model, prompt(length), 8)


@pytest.mark.parametrize(
    ("scheduled", "drafts", "message"),
    [
        ({0: 4}, {0: 4}, "4 of 4 tokens are drafts"),
        ({0: 6}, {0: 5}, "5 of 6 tokens are drafts"),
        ({0: 1}, {0: -1}, "tokens up to"),
        ({0: 3}, {0: 1}, "3 tokens up to"),
        ({1: 3}, {1: 2}, "2 of 3 tokens are drafts"),
        ({2: 6}, {2: 1}, "1 of 6 tokens are drafts"),
    ],
)
def test_drafts_that_follow_no_last_known_token_are_refused(
    model: DecoderModel, scheduled: dict[int, int], drafts: dict[int, int], message: str
) -> None:
    driver = make_driver(model, proposer=KnownTexts([], 1.0))
    driver.add(0, prompt(4))
    driver.step({0: 4})
    driver.add(1, prompt(9))
    driver.add(2, prompt(5), yields_vector=True)
    with pytest.raises(InvalidStep, match=message):
        driver.launch(scheduled, drafts)


def test_nothing_is_drafted_without_a_proposer(model: DecoderModel) -> None:
    driver = make_driver(model)
    driver.add(0, prompt(4))
    driver.step({0: 4})
    with pytest.raises(InvalidStep, match="there may be 0"):
        driver.launch({0: 2}, {0: 1})


def vector_of(driver: Driver, request_id: int, scheduled: dict[int, int], **options: Any) -> np.ndarray:
    output = driver.launch(scheduled, **options)
    host = output.wait()
    assert output.request_ids[-1] == request_id and host.vectors is not None
    assert host.vectors.dtype == np.float32 and len(host.num_tokens) == len(output.request_ids) - len(host.vectors)
    return host.vectors[-1]


def test_a_vector_is_the_hidden_state_that_the_next_token_is_sampled_from(model: DecoderModel) -> None:
    driver = make_driver(model)
    driver.add(0, prompt(20), yields_vector=True)
    vector = vector_of(driver, 0, {0: 20})
    assert vector.shape == (model.config.hidden_size,)
    logits = model.compute_logits(torch.from_numpy(vector)[None])
    assert [int(logits.argmax())] == alone(model, prompt(20), 1)


@pytest.mark.parametrize("make", DRIVERS)
def test_vectors_of_chunked_prompts_beside_others(
    model: DecoderModel,
    plain: Callable[[str, int], list[int]],
    make: Callable[[DecoderModel, KnownTexts], Driver],
) -> None:
    whole = make_driver(model)
    whole.add(0, prompt(20, 4), yields_vector=True)
    expected = vector_of(whole, 0, {0: 20})
    driver = make(model, KnownTexts([prompt(6, 1) + plain("seeded", 1)], 1.0))
    driver.add(0, prompt(20, 4), yields_vector=True)
    driver.add(1, prompt(6, 1), SEEDED)
    driver.step({1: 6, 0: 9})
    driver.step({0: 10, 1: 1})
    np.testing.assert_allclose(vector_of(driver, 0, {0: 1, 1: 3}, drafts={1: 2}), expected, atol=1e-5)
    with pytest.raises(InvalidStep, match="request 0: 1 tokens up to 21"):
        driver.launch({0: 1})
    driver.runner.reset()


def test_a_vector_of_the_longest_request(model: DecoderModel) -> None:
    driver = make_driver(model)
    driver.add(0, prompt(LIMITS.max_model_len), yields_vector=True)
    assert np.isfinite(vector_of(driver, 0, {0: LIMITS.max_model_len})).all()
    driver.finish(0)
    driver.add(0, prompt(5))
    assert driver.generate(0, 3, first=5) == alone(model, prompt(5), 3)
