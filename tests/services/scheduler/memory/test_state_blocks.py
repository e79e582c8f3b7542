"""Groups of states: the ends of prefix hits, the blocks that are read, and the few blocks that a request holds."""

from __future__ import annotations

from tests.fakes import FakeExecutor, expected_output
from tests.services.scheduler.pure_line import PureLine

VOCAB_SIZE = 1000
PROMPT = [7 * i % VOCAB_SIZE for i in range(30)]


def make_line(num_blocks: int = 0, *, num_states: int = 20, enable_prefix_caching: bool = True) -> PureLine:
    """Returns a line with state blocks of 8 tokens and other blocks of 4. num_blocks: of the other blocks."""
    executor = FakeExecutor(
        num_blocks=num_blocks, states={8: num_states}, block_size=4, max_num_batched_tokens=64, vocab_size=VOCAB_SIZE
    )
    return PureLine(executor, enable_prefix_caching=enable_prefix_caching)


def run(line: PureLine, prompt: list[int], max_tokens: int = 4) -> int:
    """Returns how many tokens of a request were found."""
    request = line.add(prompt, max_tokens=max_tokens)
    line.run()
    assert line.outputs[request.request_id] == expected_output(prompt, max_tokens, vocab_size=VOCAB_SIZE)
    assert request.num_cached_tokens is not None
    return request.num_cached_tokens


def test_a_prefix_ends_where_a_state_was_kept() -> None:
    line = make_line()
    assert run(line, PROMPT) == 0
    assert run(line, PROMPT) == 24, "30 tokens are three blocks of 8 and a rest"
    assert run(line, [*PROMPT[:23], 1]) == 16
    assert run(line, [*PROMPT[:7], 1, 2]) == 0
    follow_up = [*PROMPT, *expected_output(PROMPT, 4, vocab_size=VOCAB_SIZE), 5]
    assert run(line, follow_up) == 32, "a state that output has led to"


def test_only_the_last_state_of_a_prefix_has_to_be_there() -> None:
    """Four blocks are in the pool, and a prompt of 24 tokens has written three."""
    line = make_line(num_states=4)
    assert run(line, PROMPT[:25], max_tokens=1) == 0
    run(line, [9] * 9, max_tokens=1)  # takes the block that cannot be found and the first prefix's
    assert run(line, PROMPT[:25], max_tokens=1) == 24


def test_beside_attention_a_prefix_ends_where_both_can_go_on() -> None:
    line = make_line(num_blocks=12)
    run(line, PROMPT)
    assert run(line, [*PROMPT[:23], 1]) == 16, "attention knows 20 tokens, the states 16"


def test_an_equal_prompt_waits_a_step_for_the_state_of_the_first() -> None:
    """A request cannot continue a state that the same step writes."""
    line = make_line()
    for _ in range(2):
        line.add(PROMPT[:20], max_tokens=3)
    line.run()
    assert [step.num_scheduled_tokens for step in line.steps[:2]] == [[20], [1, 4]]
    assert run(line, PROMPT[:20]) == 16


def test_equal_prompts_without_a_whole_state_are_computed_at_once() -> None:
    line = make_line()
    for _ in range(2):
        line.add(PROMPT[:8], max_tokens=3)
    line.run()
    assert line.steps[0].num_scheduled_tokens == [8, 8]


def test_without_prefix_caching_nothing_is_found() -> None:
    line = make_line(enable_prefix_caching=False)
    assert run(line, PROMPT) == run(line, PROMPT) == 0


def test_a_request_holds_two_states_however_long_it_is() -> None:
    line = make_line(num_states=12)
    request = line.add([1, 2, 3], max_tokens=200)
    most = 0
    while not request.is_finished:
        while line.schedule() is not None:
            most = max(most, len(request.blocks.held[0].blocks))
        line.receive()
    assert most == 2 and line.replica.counts.num_preemptions == 0
