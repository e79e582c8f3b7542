"""Log probabilities of prompts on the host: the lines of each step, and of whole prompts once they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# The results of a step that `PromptLines` are made of.
_NAMES = ("prompt_token_ids", "prompt_logprobs", "prompt_ranks")


@dataclass(frozen=True)
class PromptLines:
    """The lines of n consecutive tokens of a prompt, k entries each: the token itself, then the most probable ones."""

    token_ids: np.ndarray  # int64 [n, k]
    logprobs: np.ndarray  # fp32 [n, k]
    ranks: np.ndarray  # int64 [n], of the token itself

    @classmethod
    def joined(cls, parts: Sequence[PromptLines], num_entries: int) -> PromptLines:
        """Returns the first num_entries entries of every line."""
        if not parts:  # the prompt is a single token
            nothing = np.empty((0, num_entries))
            return cls(nothing.astype(np.int64), nothing.astype(np.float32), np.empty(0, dtype=np.int64))
        return cls(
            np.concatenate([part.token_ids[:, :num_entries] for part in parts]),
            np.concatenate([part.logprobs[:, :num_entries] for part in parts]),
            np.concatenate([part.ranks for part in parts]),
        )


@dataclass
class ScoredPrompt:
    """A request that wants log probabilities of its prompt, until that is computed."""

    request_id: int
    num_tokens: int
    num_top: int
    # By the place of the first token. Filled by every thread that waits for results; one may handle a later step before
    # another handles an earlier one.
    lines: dict[int, PromptLines] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptPart:
    """The part of one prompt that a step computes: the lines of `count` tokens from `first` on."""

    prompt: ScoredPrompt
    first: int
    count: int  # 0 if only the last token is left to compute
    is_last: bool  # the prompt is computed, so the request is sampled


def take_lines(results: dict[str, np.ndarray], parts: Sequence[PromptPart]) -> dict[int, PromptLines]:
    """Moves the lines of a step's results to their prompts; returns the lines of completed prompts, by request."""
    if not parts:
        return {}
    columns = [results.pop(name) for name in _NAMES if name in results]
    whole, end = {}, 0
    for part in parts:
        start, end, prompt = end, end + part.count, part.prompt
        if part.count:
            prompt.lines[part.first] = PromptLines(*(column[start:end] for column in columns))
        if part.is_last:
            lines = [prompt.lines[first] for first in sorted(prompt.lines)]
            whole[prompt.request_id] = PromptLines.joined(lines, 1 + prompt.num_top)
    return whole
