"""Requests that fail in a step: each alone where it is known which, and never the executor with them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.config import ExecutorConfig
from pagewire.services.executor import stats
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.device.errors import DeviceError
from pagewire.services.executor.grammar.matcher import TokenBits
from pagewire.services.executor.loading import served_model
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.start import startup
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.step.failures import Cause, find_failures
from pagewire.services.executor.step.step import Step
from pagewire.v1 import executor_pb2
from tests.services.executor.helpers.stepping import (
    CPU,
    GREEDY,
    LIMITS,
    PENALIZED,
    SEEDED,
    VOCAB_SIZE,
    WITH_LOGPROBS,
    alone,
    make_driver,
    prompt,
    tiny_llama,
    write_tiny_llama,
)
from tests.services.executor.service.test_servicer import (
    INFO,
    NUM_BLOCKS,
    error_of,
    first_step,
    generate,
    next_step,
    opened,
    serving,
)
from tests.sweep import examples

# The model has no numbers wherever this token is seen; in RAISES a step fails that has it.
NAN, RAISES = 150, 151
KINDS = [GREEDY, SEEDED, PENALIZED, WITH_LOGPROBS]


def weights(model: DecoderModel, name: str) -> torch.Tensor:
    return dict(model.load_targets())[name]


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pw-") as directory:
        yield f"unix:{directory}/executor.sock"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    model = tiny_llama(tmp_path_factory.mktemp("poisoned"))
    with torch.inference_mode():
        weights(model, "model.embed_tokens.weight")[NAN] = torch.nan
        weights(model, "lm_head.weight")[[NAN, RAISES]] = 0.0  # no test uses them by chance
    return model


def num_failed(cause: str) -> float:
    return stats.FAILED_REQUESTS.labels(cause)._value.get()


def innocent(length: int, seed: int) -> list[int]:
    return [token_id - 10 * (token_id in (NAN, RAISES)) for token_id in prompt(length, seed)]


@settings(max_examples=examples(25), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    poisons=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from(KINDS)), min_size=1, max_size=3),
    kinds=st.lists(st.sampled_from(KINDS), min_size=4, max_size=4),
)
def test_a_request_that_yields_nan_fails_alone(
    model: DecoderModel, lengths: list[int], poisons: list[tuple[int, int, object]], kinds: list[object]
) -> None:
    """Neighbours of all kinds get the tokens they get alone, in that step and those that follow."""
    driver = make_driver(model)
    good = {number: innocent(length, number) for number, length in enumerate(lengths)}
    bad = {10 + i: [*innocent(before, 7), NAN, *innocent(behind, 8)] for i, (before, behind, _) in enumerate(poisons)}
    samplings = dict(zip([*good, *bad], [*kinds[: len(good)], *(kind for _, _, kind in poisons)], strict=True))
    for request_id, token_ids in (good | bad).items():
        driver.add(request_id, token_ids, samplings[request_id])  # type: ignore[arg-type]
    host = driver.step({request_id: len(token_ids) for request_id, token_ids in (good | bad).items()})
    assert {request_id: failure.cause for request_id, failure in host.failures.items()} == dict.fromkeys(bad, Cause.NAN)
    host = driver.step(dict.fromkeys(good | bad, 1))  # two steps are in flight: theirs is not reported yet
    assert host.failures.keys() == bad.keys()
    for request_id in bad:
        driver.finish(request_id)
    for _ in range(4):
        assert not driver.step(dict.fromkeys(good, 1)).failures
    for request_id, token_ids in good.items():
        assert driver.tokens[request_id] == alone(model, token_ids, 6, samplings[request_id])  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, WITH_LOGPROBS])
def test_pages_that_had_no_numbers_serve_the_next_request(model: DecoderModel, sampling: object) -> None:
    driver = make_driver(model, num_blocks=4)
    driver.add(0, [NAN] * 30, sampling)  # type: ignore[arg-type]
    assert driver.step({0: 30}).failures
    driver.finish(0)
    driver.add(1, innocent(11, 1), sampling)  # type: ignore[arg-type]
    assert driver.generate(1, 15, first=11) == alone(model, innocent(11, 1), 15, sampling)  # type: ignore[arg-type]


def test_tokens_that_are_none_and_vectors_without_numbers_are_found() -> None:
    ids, vectors = np.array([3, -1, 5, 9, 200, 7]), np.array([[1.0, np.nan], [2.0, 3.0], [np.inf, 0.0]], np.float32)
    failures = find_failures([10, 11, 12, 20, 21, 22], np.array([2, 2, 2]), ids, vectors, 200)
    assert {request_id: failure.cause for request_id, failure in failures.items()} == {
        10: Cause.NAN,
        12: Cause.ILLEGAL_TOKEN,
        20: Cause.NAN,
        22: Cause.NAN,
    }
    assert failures[12].message == "the token 200 that was sampled for this request is outside the vocabulary of 200"
    assert not find_failures([1], np.array([2]), np.array([0, 199]), None, 200)


class BrokenMatcher:
    """Allows token 5, and fails at its second token."""

    error, num_free, is_over = "", 0, False

    def __init__(self) -> None:
        self._num_tokens = 0

    def give_up(self, reason: str) -> None:
        raise AssertionError(reason)

    def advance(self, token_ids: Sequence[int]) -> None:
        self._num_tokens += len(token_ids)
        if self._num_tokens == 2:
            raise ZeroDivisionError("in the grammar")

    def fill_mask(self, mask: np.ndarray) -> None:
        mask.fill(0)
        TokenBits([5]).allow(mask)

    def allows(self, token_id: int) -> bool:
        return token_id == 5

    def forced(self) -> Sequence[int]:
        return [5]

    def place(self) -> int:
        return self._num_tokens

    def go_back(self, place: int) -> None:
        self._num_tokens = place


def test_a_grammar_that_raises_fails_alone(model: DecoderModel) -> None:
    driver = make_driver(model)
    driver.add(0, innocent(5, 0), matcher=BrokenMatcher())
    driver.add(1, innocent(9, 1))
    outputs = [driver.launch({0: 5, 1: 9}), driver.launch({0: 1, 1: 1}), driver.launch({0: 1, 1: 1})]
    failures = [output.failures for output in outputs]
    for output in outputs:
        driver.collect(output)
    assert [list(failed) for failed in failures] == [[], [], [0]]
    assert failures[2][0].cause == "grammar"
    assert "an internal error; the executor's log has it" in failures[2][0].message
    driver.finish(0)
    # The next one with a grammar is served, by the same thread.
    driver.add(2, innocent(4, 2), matcher=BrokenMatcher())
    driver.step({1: 1, 2: 4})
    assert driver.tokens[2] == [5] and driver.tokens[1] == alone(model, innocent(9, 1), 4)


class RaisingRunner(ModelRunner):
    """Fails in the middle of a step with RAISES in a prompt."""

    def _add_new(self, step: Step) -> None:
        super()._add_new(step)
        if any(RAISES in request.token_ids for request in step.new_requests):
            raise LookupError("no such thing")


@pytest.fixture
def runner(model: DecoderModel) -> Iterator[Callable[[], tuple[ModelRunner, object]]]:
    yield lambda: (RaisingRunner(model, LIMITS, NUM_BLOCKS, CPU), INFO)


async def test_an_exception_ends_the_stream_and_not_the_executor(address: str, model: DecoderModel, runner) -> None:
    async with serving(address, runner) as service:
        for _ in range(2):
            call = await opened(service)
            await call.write(first_step([5, RAISES, 6]))
            await call.write(next_step(2))
            error = await error_of(call)
            assert error.code() is grpc.StatusCode.UNKNOWN
            assert error.details() == "a step failed: LookupError: no such thing"
            assert await generate(await opened(service), 8, prompt(9)) == alone(model, prompt(9), 8)
        assert not service.worker.failed.done()


def entering(step_id: int, request_id: int, token_ids: list[int], *others: int) -> executor_pb2.StepRequest:
    """One that enters, beside others that decode; blocks by its id."""
    step = first_step(token_ids, request_id)
    step.step_id = step_id
    step.new_requests[0].blocks[0].ids[:] = [(5 * request_id + i) % NUM_BLOCKS for i in range(4)]
    step.request_ids.extend(others)
    step.num_scheduled_tokens.extend([1] * len(others))
    step.num_new_blocks.extend([0] * len(others))
    return step


async def test_results_name_the_requests_that_failed(address: str, model: DecoderModel, runner) -> None:
    before = num_failed("nan")
    async with serving(address, runner) as service:
        call = await opened(service)
        steps = [
            entering(1, 0, innocent(9, 1)),
            entering(2, 1, [NAN, 5, 6], 0),
            entering(3, 2, [7, VOCAB_SIZE, 8], 0, 1),
            executor_pb2.StepRequest(
                step_id=4, finished_request_ids=[1, 2], request_ids=[0], num_scheduled_tokens=[1], num_new_blocks=[0]
            ),
        ]
        results = []
        for step in steps:
            await call.write(step)
            results.append(await call.read())
    assert [result.token_ids[list(result.request_ids).index(0)] for result in results] == alone(
        model, innocent(9, 1), 4
    )
    errors = [{request_id: error.code for request_id, error in result.errors.items()} for result in results]
    assert errors == [{}, {1: 13}, {1: 13, 2: 3}, {}]
    assert "the model yields NaN" in results[1].errors[1].message
    assert results[2].errors[2].message == "token id 200 is outside the vocabulary of 200"
    assert num_failed("nan") == before + 1, "once, though it failed twice"


async def test_a_model_that_yields_nan_is_distinguished_from_requests(address: str, tmp_path: Path) -> None:
    """No request is blamed when the model is broken."""
    model = tiny_llama(tmp_path)
    async with serving(address, lambda: (assemble(model, LIMITS, NUM_BLOCKS, CPU), INFO)) as service:
        call = await opened(service)
        for step in (entering(1, 0, prompt(9)), entering(2, 1, prompt(7), 0)):
            await call.write(step)
            assert not (await call.read()).errors
        with torch.inference_mode():
            weights(model, "model.norm.weight").fill_(torch.nan)
        await call.write(
            executor_pb2.StepRequest(step_id=3, request_ids=[0, 1], num_scheduled_tokens=[1, 1], num_new_blocks=[0, 0])
        )
        error = await error_of(call)
        assert error.code() is grpc.StatusCode.DATA_LOSS
        assert "no numbers (NaN) for a fixed prompt either: its weights are damaged" in (error.details() or "")
        with pytest.raises(DeviceError, match="weights are damaged"):
            await asyncio.wrap_future(service.worker.failed)


async def test_requests_that_yield_nan_are_distinguished_from_a_model(
    address: str, model: DecoderModel, runner
) -> None:
    """Two at once raise doubts, and so do three one after the other; the fixed prompt dispels them."""
    async with serving(address, runner) as service:
        call = await opened(service)
        both = entering(1, 0, [NAN, 5])
        both.new_requests.append(entering(1, 1, [6, NAN]).new_requests[0])
        both.request_ids.append(1)
        both.num_scheduled_tokens.append(2)
        both.num_new_blocks.append(0)
        await call.write(both)
        error = await error_of(call)
        assert error.code() is grpc.StatusCode.UNKNOWN
        assert error.details() == "a step failed: OnlyNan: all requests of the step yielded NaN for their next token"
        call = await opened(service)
        for step_id in (1, 2):
            await call.write(entering(step_id, step_id, [NAN, 5]))
            assert (await call.read()).errors[step_id].code == 13
        await call.write(entering(3, 3, [NAN, 5]))
        assert (await error_of(call)).code() is grpc.StatusCode.UNKNOWN
        assert await generate(await opened(service), 8, innocent(9, 4)) == alone(model, innocent(9, 4), 8)
        assert not service.worker.failed.done()


def test_a_model_without_numbers_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ExecutorConfig(
        model=str(write_tiny_llama(tmp_path)), load_format="dummy", device="cpu", kv_cache_memory_bytes=2**20
    )
    info = startup.start_runner(config, config.model, lambda fraction, text: None)[1]
    assert info.vocab_size == VOCAB_SIZE
    load_model = served_model.load_model

    def damaged(*arguments: object, **options: object) -> object:
        model = load_model(*arguments, **options)  # type: ignore[arg-type]
        with torch.inference_mode():
            weights(model, "model.norm.weight").fill_(torch.nan)  # type: ignore[arg-type]
        return model

    monkeypatch.setattr(served_model, "load_model", damaged)
    with pytest.raises(ModelLoadError, match=r"no numbers \(NaN\) for a fixed prompt either.*try --dtype float32"):
        startup.start_runner(replace(config), config.model, lambda fraction, text: None)
