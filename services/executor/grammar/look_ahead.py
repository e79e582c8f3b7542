"""Drafts and masks ahead of a matcher, without a change of its position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagewire.services.executor.step.matcher import Matcher


def fitting(matcher: Matcher, proposed: Sequence[int], most: int) -> list[int]:
    """Returns at most `most` drafts: forced tokens, and proposed ones that are permitted."""
    place, drafts, agrees = matcher.place(), list[int](), True
    try:
        while len(drafts) < most:
            following = list(matcher.forced()[: most - len(drafts)])
            if not following and agrees:
                following = [token_id for token_id in proposed[len(drafts) :][:1] if matcher.allows(token_id)]
            if not following:
                break
            agrees = agrees and following == list(proposed[len(drafts) : len(drafts) + len(following)])
            drafts += following
            matcher.advance(following)
    finally:
        matcher.go_back(place)
    return drafts


def fill_masks(matcher: Matcher, drafts: Sequence[int], masks: np.ndarray) -> None:
    """Fills masks [n, ceil(vocab_size / 32)] behind each of the drafts [n], as `Matcher.fill_mask` does. Behind a draft
    that is not permitted, and is therefore refused, any token may follow."""
    place = matcher.place()
    try:
        for index, token_id in enumerate(drafts):
            if not matcher.allows(token_id):
                masks[index:] = -1
                return
            matcher.advance([token_id])
            matcher.fill_mask(masks[index])
    finally:
        matcher.go_back(place)
