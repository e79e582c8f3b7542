"""A request that makes executors fail ends; the others lose time, never their answers."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.scheduler.suspicion.suspects import MAX_LOSSES, MAX_SILENT_LOSSES
from pagewire.services.scheduler.values.executor_loss import Loss
from pagewire.services.scheduler.values.request import FinishReason
from tests.fakes import FakeExecutor, FakeExecutorDied, expected_output
from tests.services.scheduler.pure_line import PureLine
from tests.sweep import examples

VOCAB_SIZE = 1000
DEADLY, REFUSED, NAN = 999, 998, 997
FIRST = {"deadly": [DEADLY], "refused": [REFUSED], "nan": [NAN]}


def prompt_of(number: int, length: int = 8) -> list[int]:
    return [(number * 101 + i) % 900 for i in range(length)]


def make_executor(**options: Any) -> FakeExecutor:
    poison: dict[str, Any] = {"deadly_token_id": DEADLY, "refused_token_id": REFUSED, "nan_token_id": NAN}
    return FakeExecutor(num_blocks=64, block_size=4, max_num_batched_tokens=20, **poison, **options)


def make_line(num_replicas: int = 1, deadly_from: int = 0, **config: Any) -> PureLine:
    return PureLine(*(make_executor(deadly_from=deadly_from) for _ in range(num_replicas)), **config)


def run(line: PureLine, loss: Loss = Loss.DEVICE) -> int:
    """Runs until all requests have ended, with a new executor for each that dies, in this way. Returns how many
    died."""
    num_deaths, indices = 0, range(len(line.executors))
    while line.scheduler.num_running or line.scheduler.num_waiting or any(map(line.num_in_flight, indices)):
        assert num_deaths < 50, "executors die for ever"
        has_worked = False
        for index in indices:
            try:
                while line.schedule(index) is not None:
                    has_worked = True
            except FakeExecutorDied:
                num_deaths += 1
                has_worked = True
                line.die(index=index, loss=loss)
            if line.num_in_flight(index):
                has_worked = True
                line.receive(index)
        assert has_worked, "requests are stuck"
    return num_deaths


@settings(max_examples=examples(150), deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["good", "good", "deadly", "nan", "refused"]), min_size=1, max_size=8),
    num_replicas=st.integers(1, 2),
    loss=st.sampled_from([Loss.STEP, Loss.HANG, Loss.SILENT]),
    deadly_from=st.sampled_from([0, 0, 1, 5]),
    pipeline_depth=st.sampled_from([1, 2]),
    max_num_seqs=st.integers(1, 8),
    enable_chunked_prefill=st.booleans(),
    num_steps_before=st.integers(0, 4),
)
def test_only_the_poisonous_end_with_an_error(
    kinds: list[str], num_replicas: int, deadly_from: int, num_steps_before: int, loss: Loss, **config: Any
) -> None:
    """Requests are found after as many tokens as they are harmless for; each costs two executors, or three that
    vanish."""
    line = make_line(num_replicas, deadly_from, **config)
    line.add(prompt_of(0), max_tokens=12)
    for _ in range(num_steps_before):
        line.schedule()
        line.receive()
    prompts = [[*FIRST.get(kind, []), *prompt_of(number)] for number, kind in enumerate(kinds, start=1)]
    for prompt in prompts:
        line.add(prompt, max_tokens=12)
    num_deaths = run(line, loss)
    for request_id, (kind, prompt) in enumerate(zip(["good", *kinds], [prompt_of(0), *prompts], strict=True), start=1):
        num_tokens = {"good": 12, "refused": 0}.get(kind, deadly_from)
        tokens = line.outputs[request_id]
        assert line.ends[request_id] == [FinishReason.LENGTH if kind == "good" else FinishReason.ERROR]
        assert tokens == expected_output(prompt, num_tokens, vocab_size=VOCAB_SIZE)[: len(tokens)]
        assert kind == "deadly" or len(tokens) == num_tokens
    most = MAX_LOSSES if loss.is_of_step else MAX_SILENT_LOSSES
    assert num_deaths <= most * kinds.count("deadly")
    assert all(replica.kv.num_free_blocks == 64 for replica in line.scheduler.replicas)


def test_outputs_of_one_request_cost_two_executors_together() -> None:
    """Eight choices of a deadly prompt, and one that differs by its temperature."""
    line = make_line()
    for seed in range(8):
        line.add([DEADLY, 5], max_tokens=12, seed=seed)
    line.add([DEADLY, 5], max_tokens=12, seed=3, temperature=0.5)
    good = line.add(prompt_of(1), max_tokens=12)
    assert run(line) <= 2 * MAX_LOSSES
    assert len(line.crashers) == 9 and good.finish_reason is FinishReason.LENGTH


def test_who_is_alone_and_first_charged_has_a_second_try() -> None:
    line = make_line()
    request = line.add(prompt_of(1), max_tokens=12)
    line.schedule()
    line.die()
    assert run(line) == 0 and request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("is_explained", [True, False])
def test_a_successor_that_knows_how_the_process_ended_spares_a_third_one(is_explained: bool) -> None:
    line = make_line()
    deadly = line.add([DEADLY, 5], max_tokens=12)
    good = line.add(prompt_of(1), max_tokens=12)
    num_deaths = 0
    while not deadly.is_finished:
        with pytest.raises(FakeExecutorDied):
            while line.schedule() is not None or line.num_in_flight():
                if line.num_in_flight():
                    line.receive()
        num_deaths += 1
        line.lose()
        line.attach(predecessor_failed=is_explained)
    assert num_deaths == (2 if is_explained else 3)
    assert run(line) == 0 and good.finish_reason is FinishReason.LENGTH


def test_a_successor_ends_no_request_that_was_cleared_or_not_alone() -> None:
    line = make_line()
    requests = [line.add(prompt_of(number), max_tokens=12) for number in range(2)]
    line.schedule()
    line.lose()
    line.attach(predecessor_failed=True)  # of two, it is unknown which
    line.schedule()
    line.receive()
    line.schedule()
    line.lose()
    line.attach(predecessor_failed=True)
    assert run(line) == 0
    assert [request.finish_reason for request in requests] == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize("loss", [Loss.WEIGHTS, Loss.UNLISTED, Loss.LEFT_TO_OTHERS, Loss.MODEL])
def test_a_loss_that_is_no_requests_fault_makes_no_suspects(loss: Loss) -> None:
    line = make_line()
    requests = [line.add(prompt_of(number), max_tokens=12) for number in range(3)]
    line.schedule()
    line.lose(loss=loss)
    line.attach()
    assert not any(map(line.is_suspect, requests))
    line.run()


def test_the_end_of_a_leaving_executor_is_a_requests_fault_if_it_reports_so() -> None:
    for loss, num_suspects in ((Loss.SILENT, 0), (Loss.STEP, 3)):
        line = make_line()
        requests = [line.add(prompt_of(number), max_tokens=12) for number in range(3)]
        line.schedule()
        line.scheduler.replicas[0].is_leaving = True
        line.lose(loss=loss)
        assert sum(map(line.is_suspect, requests)) == num_suspects
        line.attach()
        line.run()


def test_others_run_on_while_a_long_suspect_is_computed() -> None:
    """Other requests run in turns with the suspect, which has a prompt of ten steps."""
    line = make_line(pipeline_depth=2)
    suspect = line.add(prompt_of(1, 190), max_tokens=5)
    line.schedule()
    line.die()
    others = [line.add(prompt_of(number), max_tokens=30) for number in range(2, 4)]
    line.schedule()
    line.receive()
    assert line.steps[-1].request_ids == [suspect.request_id]
    others_before = [request.num_tokens for request in others]
    assert run(line) == 0
    alone = [step.request_ids for step in line.steps if suspect.request_id in step.request_ids][:10]
    assert alone == [[suspect.request_id]] * 10
    assert others_before


def test_kv_of_what_has_no_numbers_is_not_found_again() -> None:
    line = make_line()
    prompt = [NAN, *prompt_of(1, 15)]
    line.add(prompt, max_tokens=5)
    assert run(line) == 0
    assert line.ends[1] == [FinishReason.ERROR] and not line.outputs[1]
    line.executor.nan_token_id = None  # it was the memory, say
    line.add(prompt, max_tokens=5)
    assert run(line) == 0
    assert line.outputs[2] == expected_output(prompt, 5, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_deaths_with_progress_in_between_are_no_requests_fault(pipeline_depth: int) -> None:
    line = make_line(pipeline_depth=pipeline_depth)
    requests = [line.add(prompt_of(number), max_tokens=56) for number in range(4)]
    for _ in range(6):
        before = [request.num_tokens for request in requests]
        while any(request.num_tokens == num for request, num in zip(requests, before, strict=True)):
            while line.schedule() is not None:
                pass
            line.receive()
        line.schedule()
        line.die()
    assert line.scheduler.num_waiting == 4
    assert run(line) == 0 and not line.crashers
    for number in range(4):
        assert line.outputs[number + 1] == expected_output(prompt_of(number), 56, vocab_size=VOCAB_SIZE)


def test_deaths_of_an_idle_executor_and_deaths_while_waiting_do_not_count() -> None:
    line = make_line(max_num_seqs=1)
    line.add(prompt_of(1), max_tokens=200)
    waiting = line.add(prompt_of(2), max_tokens=5)
    for _ in range(MAX_SILENT_LOSSES):
        line.die()
        line.schedule()
        line.receive()
    assert run(line) == 0 and not line.crashers
    assert waiting.finish_reason is FinishReason.LENGTH


def test_a_cleared_suspect_runs_beside_others_again() -> None:
    line = make_line(pipeline_depth=1)
    for number in range(3):
        line.add(prompt_of(number, 4), max_tokens=30)
    line.schedule()
    line.die()
    batches = []
    for _ in range(6):
        step = line.schedule()
        assert step is not None
        batches.append(step.request_ids)
        line.receive()
    assert batches == [[1], [1], [2], [1, 2], [3], [1, 2, 3]]  # a cleared request has a step between two suspects
    assert run(line) == 0
