"""Suffix decoding: where texts go on, what most of them go on with, and that C++ drafts the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels import reference
from pagewire.kernels.reference.drafts import places, vote
from tests.kernels.implementations import native
from tests.kernels.sampling_batches import suffix_args
from tests.sweep import examples

TOKENS = st.lists(st.integers(0, 3), min_size=2, max_size=40)


@given(TOKENS, TOKENS, st.integers(2, 8))
def test_places_have_most_tokens_in_common(text: list[int], ended: list[int], max_depth: int) -> None:
    starts, length = places(np.array(text), np.array(ended), max_depth)
    common = []
    for start in range(len(text)):
        same = 0
        while same < min(max_depth, start, len(ended)) and text[start - 1 - same] == ended[-1 - same]:
            same += 1
        common.append(same)
    longest = max(common)
    if longest < 2:
        assert (starts.tolist(), length) == ([], 0)
    else:
        assert (starts.tolist(), length) == ([start for start, same in enumerate(common) if same == longest], longest)


@pytest.mark.parametrize(
    ("text", "starts", "min_share", "draft"),
    [
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4], [2, 6, 10], 0.1, [3, 8]),  # two of three, then one of three each: 8 < 9
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4], [2, 6, 10], 0.5, [3]),
        ([1, 2, 3, -1, 5], [2], 0.1, [3]),  # an output ends
        ([1, 2], [2], 0.1, []),
    ],
)
def test_the_most_frequent_continuation_is_drafted(
    text: list[int], starts: list[int], min_share: float, draft: list[int]
) -> None:
    assert vote(np.array(text, dtype=np.int32), np.array(starts), 2, min_share) == draft


@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=200), min_size=1, max_size=3),
    others=st.lists(st.integers(-1, 3), max_size=200),
    wanted=st.integers(0, 16),
    max_depth=st.integers(2, 24),
    factor=st.sampled_from([0.5, 1.0, 4.0]),
    min_share=st.sampled_from([0.0, 0.1, 0.5]),
)
@settings(max_examples=examples(100), deadline=None)
def test_rows_are_drafted_as_specified(
    texts: list[list[int]], others: list[int], wanted: int, max_depth: int, factor: float, min_share: float
) -> None:
    """Drafts are the reference's, also with more places than count, and with tokens of others that nothing follows."""
    form = [wanted] * len(texts), others, max_depth, factor, min_share
    actual, expected = (suffix_args(texts, *form) for _ in range(2))
    native.draft_by_suffix(*actual)
    reference.draft_by_suffix(*expected)
    for ours, theirs in zip(actual[:6], expected[:6], strict=True):
        assert torch.equal(ours, theirs)
