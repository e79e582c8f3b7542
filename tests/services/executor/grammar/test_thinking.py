"""The end of the reasoning in an output, token by token."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.executor.grammar.thinking import ThinkingMatcher
from pagewire.v1.common_pb2 import SamplingParams, Thinking, TokenSequence
from tests.sweep import examples

VOCAB_SIZE = 40
EOS = 39
START, END = [1, 2], [3, 4, 3, 5]


def ids(*token_ids: int) -> TokenSequence:
    return TokenSequence(token_ids=token_ids)


def matcher(**fields: object) -> ThinkingMatcher:
    thinking = Thinking(**{"start": ids(*START), "end": ids(*END)} | fields)  # type: ignore[arg-type]
    return ThinkingMatcher(SamplingParams(thinking=thinking), None, [EOS], VOCAB_SIZE)


def allowed(which: ThinkingMatcher) -> list[int]:
    mask = np.empty(2, dtype=np.int32)
    which.fill_mask(mask)
    return [token for token in range(VOCAB_SIZE) if mask[token // 32] >> (token % 32) & 1]


ANY = list(range(VOCAB_SIZE))


def follow(which: ThinkingMatcher, wanted: Sequence[int]) -> list[int]:
    """The output of a model that wants these tokens, and takes what it may have instead."""
    output = []
    for token in wanted:
        may = allowed(which)
        assert may == ANY or len(may) == 1
        output.append(token if token in may else may[0])
        which.advance(output[-1:])
    return output


@pytest.mark.parametrize(
    ("wanted", "budget", "expected"),
    [
        ([9, 9, 9, 9, 9, 9, 9, 9], 2, [9, 9, *END, 9, 9]),
        ([9, 9, 9, 9, 9, 9], 0, [*END, 9, 9]),
        ([9, *END, 9, 9], 8, [9, *END, 9, 9]),
        # What was begun is gone on with, also where it begins anew on the way.
        ([9, 3, 9, 9, 9, 9], 2, [9, *END, 9]),
        ([3, 4, 3, 4, 9, 9, 9], 4, [3, 4, 3, 4, 3, 5, 9]),
        # The mark that the prompt ends with is repeated.
        ([*START, 9, 9, 9, 9, 9, 9], 2, [*START, 9, 9, *END]),
        # Behind the answer's beginning nothing is reasoning.
        ([9, *END, *START, 9, 9, 9, 9], 1, [9, *END, *START, 9, 9, 9, 9]),
    ],
)
def test_a_reasoning_that_the_prompt_has_begun(wanted: list[int], budget: int, expected: list[int]) -> None:
    assert follow(matcher(begun=True, budget=budget), wanted) == expected


def test_a_reasoning_that_the_output_begins() -> None:
    assert follow(matcher(budget=1), [8, *START, 7, 7, 7, 7, 7, 7]) == [8, *START, 7, *END, 7]
    assert follow(matcher(budget=1), [8] * 20) == [8] * 20


def test_messages_of_reasoning_share_a_budget() -> None:
    """The marks of GPT-OSS: a closing that is more than the end, an answer that has a mark of its own."""
    answer = [1, 7]
    marks = {"end": ids(6), "answer": ids(*answer), "closing": ids(6, 8, *answer), "budget": 3}
    assert follow(matcher(**marks), [*START, 9, 9, 6, *START, 9, 9, 9, 9, 9]) == [
        *START,
        9,
        9,
        6,
        *START,
        9,
        6,
        8,
        *answer,
    ]
    calls = [*START, 9, 9, 9, 6, 9, 9, 9, 9, 9]  # a call of a tool, which is no reasoning
    assert follow(matcher(**{**marks, "budget": 4}), calls) == calls


@settings(deadline=None, max_examples=examples(200))
@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 5, 9]), max_size=30),
    st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3),
    st.lists(st.sampled_from([3, 4]), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 8),
    st.integers(0, 30),
)
def test_no_output_thinks_longer(
    wanted: list[int], start: list[int], end: list[int], begun: bool, budget: int, cut: int
) -> None:
    fields = {"start": ids(*start), "end": ids(*end), "begun": begun, "budget": budget}
    output = follow(matcher(**fields), wanted)
    joined = "".join(map(str, output))
    mark, opening = "".join(map(str, end)), "".join(map(str, start))
    thought = joined.partition(mark)[0]
    if not begun:
        thought = thought.partition(opening)[2]
    # Of the closing, its last token alone does not count.
    assert len(thought) <= budget + len(end) - 1 + (len(start) if thought.startswith(opening) else 0)
    resumed = matcher(**fields)
    resumed.advance(output[:cut])
    assert output[:cut] + follow(resumed, wanted[cut:]) == output
    differs = next((i for i, (one, other) in enumerate(zip(output, wanted, strict=True)) if one != other), len(output))
    assert differs >= min(budget, len(output)), "before its budget is used up, an output is as without"
    one = matcher(**fields)
    assert one.num_free == budget
    one.advance(output)
    assert not one.is_over or allowed(one) == ANY
