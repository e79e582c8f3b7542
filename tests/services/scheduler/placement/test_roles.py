"""Prompts are computed on one executor and go on at another: what runs where, what is loaded, what if one is lost."""

from typing import Any

import pytest

from pagewire.services.scheduler.admission.admission import load_of
from pagewire.services.scheduler.core.wakes import Wakes
from pagewire.services.scheduler.values.executor_loss import Loss
from pagewire.services.scheduler.values.images import PromptImages
from pagewire.services.scheduler.values.request import FinishReason, Request
from pagewire.v1.common_pb2 import SamplingParams
from tests.fakes import FakeExecutor, FakeTier, expected_output, fake_prompt_logprobs
from tests.services.scheduler.pure_line import PureLine
from tests.services.scheduler.values.test_images import image

PROMPT = list(range(1, 42))  # ten blocks and a token


def executor(role: str, **options: Any) -> FakeExecutor:
    made = FakeExecutor(block_size=4, tier=None if role == "decode" else FakeTier(), **options)
    made.role = role
    return made


def line_of(*roles: str, config: dict[str, Any] | None = None, **options: Any) -> PureLine:
    return PureLine(*(executor(role, **options) for role in roles), **config or {})


def add(line: PureLine, prompt: list[int] = PROMPT, max_tokens: int = 6, **params: Any) -> Request:
    return line.add(prompt, max_tokens=max_tokens, ignore_eos=True, **params)


def assert_right(line: PureLine, *requests: Request) -> None:
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        output = line.outputs[request.request_id]
        assert output == expected_output(prompt, request.max_num_tokens - len(prompt), vocab_size=1000)
        assert line.ends[request.request_id] == [FinishReason.LENGTH]


def computed(line: PureLine) -> list[int]:
    return [one.num_executed_tokens for one in line.executors]


GROUPS: list[dict[str, Any]] = [{}, {"windows": {6: 32}}, {"num_blocks": 0, "states": {8: 32}}, {"states": {8: 32}}]


@pytest.mark.parametrize("groups", GROUPS)
def test_a_prompt_goes_on_where_it_is_decoded(groups: dict[str, Any]) -> None:
    line = line_of("prefill", "decode", **groups)
    request = add(line)
    line.run()
    assert_right(line, request)
    # The rest of the prompt behind its last block, the first token, and those that follow.
    assert computed(line) == [41, 1 + 1 + 4]
    assert request.num_preemptions == 0 and line.replica.counts.num_preemptions == 0


def test_blocks_are_loaded_while_later_chunks_run() -> None:
    line = line_of("prefill", "decode", max_num_batched_tokens=16)
    request = add(line)
    line.schedule(0)
    line.schedule(0)
    line.receive(0)  # the first chunk
    step = line.schedule(1)
    assert step is not None and not step.request_ids
    (load,) = line.executors[1].loads
    assert load.source == "executor-0" and sum(len(one.ids) for one in load.blocks) == 4
    line.end_load(1)
    line.run()
    assert_right(line, request)
    assert computed(line) == [41, 6]


def test_what_ends_with_its_prompt_stays() -> None:
    line = line_of("prefill", "decode", max_num_batched_tokens=16)
    one, vector = add(line, max_tokens=1), line.add(PROMPT, yields_vector=True)
    line.run()
    assert_right(line, one)
    assert vector.request_id in line.vectors and computed(line)[1] == 0


def test_a_replica_computes_no_step_for_a_request_that_leaves_it() -> None:
    line = line_of("prefill", "decode")
    add(line)
    assert line.schedule(0) is not None
    assert line.schedule(0) is None, "its first token is on its way"


@pytest.mark.parametrize("max_num_batched_tokens", [16, 2048])
def test_images_go_with_their_prompt(max_num_batched_tokens: int) -> None:
    line = line_of("prefill", "decode", max_num_batched_tokens=max_num_batched_tokens)
    request = add(line, images=PromptImages([image(1, 3, 8)], len(PROMPT)))
    line.run()
    assert_right(line, request)
    assert computed(line) == [41, 6]


def test_both_take_all() -> None:
    line = line_of("prefill", "both")
    line.executors[1].tier = None
    line.die(index=1)
    requests = [add(line, [number, *PROMPT]) for number in range(8)]
    line.run()
    assert_right(line, *requests)
    num_prompts = computed(line)[0] / 42
    assert 1 <= num_prompts < 8 and num_prompts.is_integer()
    # Of the prompts of the other one, it computes the rest behind the last block.
    assert computed(line)[1] == (8 - num_prompts) * (42 + 5) + num_prompts * (2 + 5)


def test_a_replica_that_gets_other_weights_takes_no_prompt_over() -> None:
    line = line_of("prefill", "decode")
    line.scheduler.replicas[1].drain()
    request = add(line)
    line.run()
    assert_right(line, request)
    assert computed(line) == [46, 0]


def test_of_many_that_rest_one_is_woken_to_decode() -> None:
    line = line_of(*["prefill"] * 12, *["decode"] * 12)
    wakes = Wakes(line.scheduler)
    for index, replica in enumerate(line.scheduler.replicas):
        wakes.after_decision(replica, line.schedule(index))
    request = add(line)
    (first,) = wakes.after_arrival(request)
    index = line.scheduler.replicas.index(first)
    assert index < 12
    wakes.after_decision(first, line.schedule(index))
    line.receive(index)
    first_again, decoder = wakes.after_result(first)
    assert first_again is first and line.scheduler.replicas.index(decoder) >= 12
    line.run()
    assert_right(line, request)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_alone_a_replica_does_both(role: str) -> None:
    line = line_of(role)
    request = add(line)
    line.run()
    assert_right(line, request)


def test_without_a_prefix_cache_roles_mean_nothing(caplog: pytest.LogCaptureFixture) -> None:
    line = line_of("prefill", "decode", config={"enable_prefix_caching": False})
    assert "roles of executors mean nothing with --no-enable-prefix-caching" in caplog.text
    requests = [add(line, [number, *PROMPT]) for number in range(4)]
    line.run()
    assert_right(line, *requests)
    assert sum(computed(line)) == 4 * (42 + 5)


def test_one_with_another_format_takes_no_prompt_over(caplog: pytest.LogCaptureFixture) -> None:
    line = line_of("prefill", "decode")
    line.executors[1].kv_format = "other"
    line.die(index=1)
    request = add(line)
    line.run()
    assert_right(line, request)
    assert computed(line) == [46, 0]
    assert caplog.text.count("executor-0 computes prompts, but no executor can load its KV blocks") == 1


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("num_turns", range(14))
def test_whichever_dies_at_whatever_moment_requests_get_their_tokens(lost: int, returns: bool, num_turns: int) -> None:
    line = line_of("prefill", "decode", max_num_batched_tokens=16)
    requests = [add(line, [number, *PROMPT]) for number in range(2)]
    turns = 0
    while turns < num_turns and line.scheduler.num_running + line.scheduler.num_waiting:
        for index in range(2):
            line.schedule(index)
        for index in range(2):
            if line.num_in_flight(index):
                line.receive(index)
            elif turns % 3 == 2 and line.executors[index].loads:
                line.end_load(index)
        turns += 1
    line.lose(lost)
    if returns:
        line.attach(lost)
    line.run()
    assert_right(line, *requests)
    for replica in line.scheduler.replicas:
        assert replica.info is None or replica.kv.num_free_blocks == 256, "a block leaks"


def test_a_source_without_the_blocks_costs_a_computation() -> None:
    line = line_of("prefill", "decode")
    request = add(line)
    line.schedule(0)
    assert line.executors[0].tier is not None
    line.executors[0].tier.forget(None)
    line.receive(0)
    line.run()
    assert_right(line, request)
    assert computed(line) == [41, 42 + 4]


def test_waiting_requests_of_one_kind_do_not_hold_up_the_other() -> None:
    line = line_of("prefill", "decode", max_num_seqs=2)
    first = [add(line, [number, *PROMPT], max_tokens=50) for number in range(2)]
    for _ in range(6):
        for index in (0, 1):
            line.schedule(index)
        line.tell_tiers()
        for index in (0, 1):
            if line.num_in_flight(index):
                line.receive(index)
            if line.executors[index].loads:
                line.end_load(index)
    assert len(line.scheduler.replicas[1].running) == 2
    later = [add(line, [9, number, *PROMPT]) for number in range(2)]
    line.schedule(0)
    line.receive(0)
    assert [len(line.outputs[one.request_id]) for one in later] == [1, 1], "no row to decode, but one for the prompt"
    line.run()
    assert_right(line, *first, *later)


def test_prompts_wait_while_too_many_wait_to_decode() -> None:
    line = line_of("prefill", "decode", num_blocks=32, max_num_seqs=1)
    requests = [add(line, [number, *PROMPT], max_tokens=30) for number in range(6)]
    for _ in range(12):
        for index in (0, 1):
            line.schedule(index)
        for index in (0, 1):
            if line.num_in_flight(index):
                line.receive(index)
            if line.executors[index].loads:
                line.end_load(index)
    begun = [one for one in requests if one.num_output_tokens]
    assert 2 <= len(begun) < 6
    line.run()
    assert_right(line, *requests)


def test_prompt_logprobs_come_with_the_first_token() -> None:
    line = line_of("prefill", "decode")
    request = add(line, prompt_logprobs=2, logprobs=1)
    line.run()
    assert_right(line, request)
    assert line.prompt_logprobs[request.request_id] == [fake_prompt_logprobs(PROMPT, 2, 1000)]


def test_a_request_decodes_where_its_adapter_is() -> None:
    line = PureLine(executor("prefill", max_adapters=1), executor("decode", max_adapters=1), attach=False)
    line.executors[0].loaded_adapters.add("ad")
    for index in (0, 1):
        line.attach(index)
    request = add(line, adapter_digest="ad")
    line.run()
    assert computed(line) == [46, 0] and line.ends[request.request_id] == [FinishReason.LENGTH]
    line.executors[1].loaded_adapters.add("ad")
    line.die(index=1)
    add(line, [7, *PROMPT], adapter_digest="ad")
    line.run()
    assert computed(line) == [46 + 42, 1 + 1 + 4 + 1]


def test_a_prompt_is_computed_where_its_adapter_is() -> None:
    line = PureLine(executor("prefill", max_adapters=1), executor("decode", max_adapters=1), attach=False)
    line.executors[1].loaded_adapters.add("ad")
    for index in (0, 1):
        line.attach(index)
    request, plain = add(line, adapter_digest="ad"), add(line, [7, *PROMPT])
    line.run()
    assert computed(line) == [42, 46 + 2 + 5] and line.ends[request.request_id] == [FinishReason.LENGTH]
    assert_right(line, plain)


def test_forecasts_are_of_the_replicas_that_take_new_requests() -> None:
    line = line_of("prefill", "decode", "decode")
    first = [add(line, [number, *PROMPT], max_tokens=50) for number in range(4)]
    for _ in range(4):
        for index in range(3):
            line.schedule(index)
            if line.num_in_flight(index):
                line.receive(index)
            if line.executors[index].loads:
                line.end_load(index)
    newcomer = Request(0, PROMPT, SamplingParams())
    load = load_of(line.scheduler, newcomer)
    assert load is not None and load.num_executors == 1 and load.num_decodes == 0 and load.num_before == 0
    line.run()
    assert_right(line, *first)


def test_weights_of_one_version_compute_all_of_a_request() -> None:
    line = line_of("prefill", "decode")
    for one in line.executors:
        one.weights_version = "v1"
    for index in (0, 1):
        line.die(index=index, loss=Loss.WEIGHTS)
    request = add(line)
    line.schedule(0)
    line.receive(0)  # it waits for v1
    line.executors[0].weights_version = "v2"
    line.die(index=0, loss=Loss.WEIGHTS)
    later = add(line, [7, *PROMPT])
    line.run()
    expected = [(request, PROMPT, "v1"), (later, [7, *PROMPT], "v2")]
    for done, prompt, version in expected:
        wanted = expected_output(prompt, 6, vocab_size=1000, weights_version=version)
        assert line.outputs[done.request_id] == wanted
