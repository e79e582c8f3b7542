"""The output of a request depends on its tokens and parameters, on nothing that the scheduler does around it."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.step.step import Blocks, InvalidStep, NewRequest, Step
from pagewire.v1.common_pb2 import SamplingParams
from tests.services.executor.helpers.stepping import (
    BLOCK_SIZE,
    CPU,
    EVEN,
    GREEDY,
    LIMITS,
    RESTRICTED,
    Driver,
    alone,
    changed,
    make_driver,
    prompt,
    sampling_params,
    tiny_llama,
)
from tests.sweep import examples

SEEDED = sampling_params(seed=11, top_p=0.95)
PENALIZED = sampling_params(seed=12, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, min_tokens=6)

SAMPLINGS = pytest.mark.parametrize(
    "sampling", [GREEDY, SEEDED, PENALIZED, RESTRICTED], ids=["greedy", "seeded", "penalized", "restricted"]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


def test_generated_tokens_vary(model: DecoderModel):
    """The tests below compare sequences; constant ones would compare equal whatever happens."""
    assert len(set(alone(model, prompt(20), 12))) > 6
    assert alone(model, prompt(20), 12) != alone(model, [9, *prompt(20)[1:]], 12)
    assert alone(model, prompt(20), 12, SEEDED) != alone(model, prompt(20), 12, changed(SEEDED, seed=3))


def test_bad_words_count_tokens_of_steps_in_flight(model: DecoderModel):
    free = SamplingParams()
    free.CopyFrom(RESTRICTED)
    free.ClearField("bad_words")

    def num_forbidden(tokens: list[int]) -> int:
        assert {*tokens} <= {*range(20, 40)}
        return sum(first in EVEN and second in EVEN for first, second in pairwise(tokens))

    assert num_forbidden(alone(model, prompt(10), 60, free)) > 5
    assert num_forbidden(alone(model, prompt(10), 60, RESTRICTED)) == 0


@SAMPLINGS
def test_batched_equals_alone(model: DecoderModel, sampling: SamplingParams):
    prompts = [prompt(length, seed=length) for length in (1, 7, 8, 9, 40)]
    samplings = [sampling if index % 2 == 0 else GREEDY for index in range(len(prompts))]
    expected = [alone(model, p, 12, s) for p, s in zip(prompts, samplings, strict=True)]
    driver = make_driver(model)
    for request_id, (token_ids, row_sampling) in enumerate(zip(prompts, samplings, strict=True)):
        driver.add(request_id, token_ids, row_sampling)
    driver.step({request_id: len(prompts[request_id]) for request_id in (3, 0, 4, 1, 2)})
    for step in range(11):
        order = np.random.default_rng(step).permutation(len(prompts)).tolist()
        driver.step(dict.fromkeys(order, 1))
    assert [driver.tokens[request_id] for request_id in range(len(prompts))] == expected


@given(st.data())
@settings(max_examples=examples(15), deadline=None)
def test_chunked_equals_whole(model: DecoderModel, data: st.DataObject):
    token_ids = prompt(45)
    driver = make_driver(model)
    driver.add(0, token_ids, SEEDED)
    driver.add(1, prompt(5, seed=3))
    left = len(token_ids)
    while left:
        chunk = data.draw(st.integers(1, left))
        driver.step({1: 5 if left == len(token_ids) else 1, 0: chunk})
        left -= chunk
    while len(driver.tokens[0]) < 8:
        driver.step({0: 1})
    assert driver.tokens[0] == alone(model, token_ids, 8, SEEDED)


def test_nothing_is_sampled_before_the_last_known_token(model: DecoderModel):
    driver = make_driver(model)
    driver.add(0, prompt(20))
    output = driver.launch({0: 19})
    assert output.request_ids == [] and output.wait().token_ids.size == 0
    assert driver.launch({0: 1}).request_ids == [0]


def test_shared_prefix_blocks_equal_own_ones(model: DecoderModel):
    prefix = prompt(3 * BLOCK_SIZE)
    first, second = prefix + prompt(6, seed=1), prefix + prompt(9, seed=2)
    driver = make_driver(model)
    driver.add(0, first)
    driver.step({0: len(first)})
    driver.add(1, second, shared_blocks=driver.blocks(0)[:3])
    driver.step({0: 1, 1: 9})
    for _ in range(7):
        driver.step({1: 1, 0: 1})
    assert driver.tokens[0] == alone(model, first, 9)
    assert driver.tokens[1] == alone(model, second, 8)


def test_two_requests_that_share_blocks_in_the_same_step(model: DecoderModel):
    """The second reads in this step what the first writes in it."""
    prefix = prompt(2 * BLOCK_SIZE)
    first, second = prefix + prompt(3, seed=1), prefix + prompt(4, seed=2)
    driver = make_driver(model)
    driver.add(0, first)
    driver.add(1, second, shared_blocks=driver.blocks(0)[:2])
    driver.step({0: len(first), 1: 4})
    assert driver.tokens == {0: alone(model, first, 1), 1: alone(model, second, 1)}


@SAMPLINGS
@pytest.mark.parametrize("num_known", [1, 5, 11])
def test_a_resumed_request_goes_on_where_it_was(model: DecoderModel, sampling: SamplingParams, num_known: int):
    """Preempted and re-added with what it had generated; penalties still know prompt from output."""
    token_ids = prompt(21)
    expected = alone(model, token_ids, 16, sampling)
    driver = make_driver(model)
    driver.add(0, token_ids, sampling)
    driver.generate(0, num_known, first=21)
    driver.finish(0)
    driver.add(5, prompt(30, seed=4))
    driver.step({5: 30})
    driver.add(0, token_ids + expected[:num_known], sampling, num_prompt_tokens=21)
    rest = driver.generate(0, 16 - num_known, first=13)
    assert rest == expected[num_known:]


@SAMPLINGS
def test_pipelined_equals_unpipelined(model: DecoderModel, sampling: SamplingParams):
    """Steps are launched before the results of earlier ones were looked at."""
    token_ids = prompt(10)
    driver = make_driver(model)
    driver.add(0, token_ids, sampling)
    outputs = [driver.launch({0: 10})]
    for _ in range(11):
        outputs.append(driver.launch({0: 1}))
        if len(outputs) > 2:
            driver.collect(outputs.pop(0))
    for output in outputs:
        driver.collect(output)
    assert driver.tokens[0] == alone(model, token_ids, 12, sampling)


def test_rows_are_reused_without_a_trace(model: DecoderModel):
    """More requests than rows pass through; each differs in everything a row stores."""
    driver = make_driver(model)
    biased = sampling_params(seed=5, logit_bias=((7, 50.0),), logprobs=3, min_tokens=50, repetition_penalty=2.0)
    for generation in range(3):
        for slot in range(LIMITS.max_num_seqs):
            request_id = 100 * generation + slot
            driver.add(request_id, prompt(9 - generation, seed=request_id), biased if generation == 1 else GREEDY)
        ids = [100 * generation + slot for slot in range(LIMITS.max_num_seqs)]
        driver.step(dict.fromkeys(ids, 9 - generation))
        host = driver.step(dict.fromkeys(ids, 1))
        assert (host.logprobs is None) == (generation != 1)
        for request_id in ids:
            driver.finish(request_id)
    for request_id in (200, 207):
        assert driver.tokens[request_id] == alone(model, prompt(7, seed=request_id), 2)
    assert driver.runner.num_requests == LIMITS.max_num_seqs
    driver.launch({})
    assert driver.runner.num_requests == 0


def test_a_request_may_finish_and_return_in_one_step(model: DecoderModel):
    driver = make_driver(model)
    driver.add(0, prompt(6))
    driver.step({0: 6})
    driver.finish(0)
    driver.add(0, prompt(12, seed=1))
    assert driver.generate(0, 4, first=12) == alone(model, prompt(12, seed=1), 4)


def test_poison_in_free_blocks_does_not_leak(model: DecoderModel):
    """Slots that were never written by a request may hold anything, even in the block that it writes to."""
    driver = make_driver(model)
    for layer in model.attention_layers:
        layer.kv_cache.fill_(float("nan"))
    driver.add(0, prompt(11))
    driver.add(1, prompt(3, seed=2), SEEDED)
    driver.step({0: 11, 1: 3})
    for _ in range(9):
        driver.step({1: 1, 0: 1})
    assert driver.tokens == {0: alone(model, prompt(11), 10), 1: alone(model, prompt(3, seed=2), 10, SEEDED)}


def test_a_request_can_grow_to_max_model_len_and_no_further(model: DecoderModel):
    driver = make_driver(model)
    driver.add(0, prompt(LIMITS.max_model_len - 2))
    driver.step({0: LIMITS.max_model_len - 2})
    driver.step({0: 1})
    assert len(driver.tokens[0]) == 2
    with pytest.raises(InvalidStep, match="max_model_len 96"):
        driver.step({0: 1})


def test_logprobs_come_with_the_requests_that_asked(model: DecoderModel):
    driver = make_driver(model)
    driver.add(0, prompt(5))
    driver.add(1, prompt(6, seed=1), changed(GREEDY, logprobs=3))
    driver.add(2, prompt(7, seed=2), changed(SEEDED, logprobs=1))
    output = driver.launch({0: 5, 2: 7, 1: 6})
    host = output.wait()
    assert output.request_ids == [0, 2, 1]
    assert output.logprobs_of == [(1, 1), (2, 3)]
    assert host.logprob_token_ids is not None and host.ranks is not None
    assert host.logprob_token_ids[:, 0].tolist() == host.token_ids[[1, 2]].tolist()
    assert host.ranks[1] == 1 and host.logprob_token_ids[1, 1] == host.token_ids[2]


def test_dummy_run_leaves_nothing_behind(model: DecoderModel):
    driver = make_driver(model)
    driver.runner.dummy_run(5, 100)
    driver.runner.dummy_run(1000, 5)
    assert driver.runner.num_requests == 0
    driver.add(0, prompt(20))
    assert driver.generate(0, 5, first=20) == alone(model, prompt(20), 5)


# Misuse


def blocks_of(*ids: int, first: int = 0) -> list[Blocks]:
    """Returns blocks of one group."""
    return [Blocks(first, np.array(ids, dtype=np.int32))]


def new_request(request_id: int = 0, num_tokens: int = 4, **changes: Any) -> NewRequest:
    request = NewRequest(
        request_id=request_id,
        token_ids=np.arange(3, 3 + num_tokens, dtype=np.int32),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        blocks=blocks_of(*[0] * -(-num_tokens // BLOCK_SIZE)),
        sampling=GREEDY,
    )
    return replace(request, **changes)


def step_of(scheduled: dict[int, int], *new: NewRequest, blocks: list[int] | None = None, **changes: Any) -> Step:
    counts = [0] * len(scheduled)
    if blocks:
        counts[0] = len(blocks)
    step = Step(
        step_id=1,
        request_ids=list(scheduled),
        num_scheduled_tokens=np.array(list(scheduled.values()), dtype=np.int64),
        num_new_blocks=np.array(counts, dtype=np.int64)[:, None],
        new_block_ids=np.array(blocks or [], dtype=np.int32),
        new_requests=new,
    )
    return replace(step, **changes)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (step_of({9: 1}), "unknown request 9"),
        (step_of({}, finished_request_ids=[9]), "unknown request 9"),
        (step_of({0: 5}, new_request()), "request 0: 5 tokens up to 5"),
        (step_of({0: 0}, new_request()), "request 0: 0 tokens"),
        (step_of({0: 4}, new_request(blocks=blocks_of())), "blocks for 0"),
        (step_of({0: 4}, new_request(blocks=blocks_of(64))), "block id 64 is outside"),
        (step_of({0: 4}, new_request(blocks=blocks_of(0, first=-1))), "before its block table"),
        (step_of({0: 4}, new_request(blocks=[])), "blocks in 0 groups; there are 1"),
        (step_of({0: 4}, new_request(), num_new_blocks=np.zeros((1, 2), dtype=np.int64)), "there are 1 groups"),
        (step_of({0: 4}, new_request(), blocks=[1, -1]), "block id -1 is outside"),
        (step_of({0: 4}, new_request(), blocks=[1] * 12), "more than the 12 blocks"),
        (step_of({0: 4}, new_request(), new_request()), "request 0 already has a row"),
        (step_of({0: 4}, new_request(), request_ids=[0, 0]), "scheduled twice"),
        (step_of({0: 4}, *(new_request(i) for i in range(9))), "no free row: max_num_seqs is 8"),
        (step_of({0: 97}, new_request(num_tokens=97)), "97 tokens; 1 to 96"),
        (step_of({0: 4}, new_request(num_computed_tokens=4)), "4 of 4 tokens computed"),
        (step_of({0: 4}, new_request(num_prompt_tokens=5)), "5 prompt tokens of 4"),
        (step_of({0: 4}, new_request(token_ids=np.array([1, 200, 3, 4], dtype=np.int32))), "token id 200"),
        (step_of({0: 80, 1: 80}, new_request(0, 80), new_request(1, 80)), "160 tokens; max_num_batched_tokens is 128"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_steps_that_contradict_what_is_known_are_refused(model: DecoderModel, step: Step, message: str):
    runner = assemble(model, LIMITS, 64, CPU)
    with pytest.raises(InvalidStep, match=message):
        runner.execute(step)
    runner.reset()
    driver = Driver(runner, 64)
    driver.add(0, prompt(9))
    assert driver.generate(0, 3, first=9) == alone(model, prompt(9), 3), "a reset makes it whole again"


def test_execute_needs_no_gradients(model: DecoderModel):
    driver = make_driver(model)
    driver.add(0, prompt(4))
    with torch.enable_grad():
        driver.step({0: 4})
    assert not torch.is_inference_mode_enabled()
