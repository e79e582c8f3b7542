"""Generates texts in steps of other shapes, to see where 16 bits turn a near tie between two tokens.

A step of several tokens may sum in another order than a step of one. `Texts.generate` generates greedily, one token per
step; `Texts.again` computes the logits of these texts in steps with drafts, which are the text itself, or with several
requests. Where another token comes out on top, the text continues as it was, so that all positions are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pagewire.config.sampling_params import with_defaults
from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.input_batch import InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.grammar.constrained_drafts import num_equal
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.step import Blocks, NewRequest, Step
from pagewire.v1.common_pb2 import SamplingParams

BLOCK_SIZE = 16
GREEDY = with_defaults(SamplingParams(temperature=0))
PROMPTS = (
    "The history of the printing press begins",
    "def quicksort(values):\n    ",
    "Dear Sir or Madam, I am writing to complain about",
    "Water boils at a lower temperature on a mountain because",
    "Ingredients: flour, butter, sugar, two eggs.\nMethod:",
    "Once upon a time there was a fox who",
    "The three laws of thermodynamics are",
    "- What is the capital of France?\n- Paris.\n- And of Italy?\n-",
)


@dataclass
class Known(Proposer):
    """A proposer of known texts."""

    max_draft_tokens: int
    text: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    def propose(self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables) -> None:
        if batch.num_samples is None:
            return
        for row, samples in zip(batch.sampled_rows.tolist(), batch.num_samples.tolist(), strict=True):
            known = int(state.columns.num_tokens[row])
            drafts = self.text[known : known + samples - 1]
            state.token_ids[row, known : known + len(drafts)] = torch.from_numpy(drafts)


@dataclass(frozen=True)
class Compared:
    """Two shapes of steps, at all positions of some texts that both have computed behind the same tokens."""

    gaps: list[float]  # where another token comes out on top
    changes: list[float]  # at all positions


def compare(one: list[dict[int, Tensor]], other: list[dict[int, Tensor]]) -> Compared:
    """Logits [vocab_size] by position, of each text."""
    gaps, changes = [], []
    for of_one, of_other in zip(one, other, strict=True):
        for position in of_one.keys() & of_other.keys():
            before, after = of_one[position], of_other[position]
            first, second = before.topk(2).indices.tolist()
            changes.append(abs(float((after[first] - after[second]) - (before[first] - before[second]))))
            best = int(after.argmax())
            if after[best] > after[first]:
                gaps.append(float(before[first] - before[best]))
    return Compared(gaps, changes)


class Texts:
    """Texts behind prompts, in steps of any shape."""

    def __init__(self, model: Model, num_tokens: int, longest_prompt: int) -> None:
        self._model, self._num_tokens = model, num_tokens
        self._max_len = longest_prompt + num_tokens + 16
        self.outputs: list[list[int]] = []

    def generate(self, prompts: list[list[int]]) -> list[dict[int, Tensor]]:
        """A token per step: what others are compared with."""
        logits = []
        for prompt in prompts:
            self.outputs.append([])
            logits.append(self._follow(prompt, self.outputs[-1], 1, 0))
        return logits

    def again(self, prompts: list[list[int]], num_requests: int, num_drafts: int) -> list[dict[int, Tensor]]:
        """The same outputs, by so many equal requests at once that have so many drafts each."""
        pairs = zip(prompts, self.outputs, strict=True)
        return [self._follow(prompt, output, num_requests, num_drafts) for prompt, output in pairs]

    @torch.inference_mode()
    def _follow(self, prompt: list[int], output: list[int], num_requests: int, num_drafts: int) -> dict[int, Tensor]:
        """Logits fp32 [vocab_size] by position of an output; one that is empty is generated, and filled."""
        blocks = -(-self._max_len // BLOCK_SIZE)
        limits = Limits(
            block_size=BLOCK_SIZE,
            max_num_seqs=num_requests,
            max_num_batched_tokens=num_requests * self._max_len,
            max_model_len=self._max_len,
        )
        proposer = Known(num_drafts, np.array(prompt + output, dtype=np.int32)) if num_drafts else None
        runner = assemble(self._model, limits, num_requests * blocks, torch.device("cpu"), proposer=proposer)
        is_new, found, known = not output, dict[int, Tensor](), 0
        with captured(self._model) as computed:
            while known < self._num_tokens:
                runner.reset()
                step, is_compared = _entering(runner, prompt + output[:known], num_requests, blocks), False
                while True:
                    gained = runner.execute(step).wait()
                    tokens = gained.token_ids[: int(gained.num_tokens[0])].tolist()
                    if is_new:
                        output += tokens
                    num_right = num_equal(tokens, output[known:])
                    for index in range(min(len(tokens), num_right + 1) if is_compared else 0):
                        found[known + index] = computed[-1][index].float().clone()
                    known += min(len(tokens), num_right + 1)
                    if num_right < len(tokens) or known >= self._num_tokens:
                        break
                    drafts = min(num_drafts, self._num_tokens - known - 1)
                    # Prompts are computed in steps of many tokens whatever is drafted.
                    step, is_compared = _decoding(runner, num_requests, drafts), True
        return found


@contextmanager
def captured(model: Model) -> Iterator[list[Tensor]]:
    """The logits of the last step, as the only element."""
    computed, compute = list[Tensor](), model.compute_logits

    def compute_logits(hidden: Tensor) -> Tensor:
        computed[:] = [compute(hidden)]
        return computed[0]

    model.compute_logits = compute_logits  # type: ignore[method-assign]
    try:
        yield computed
    finally:
        model.compute_logits = compute  # type: ignore[method-assign]


def _entering(runner: ModelRunner, token_ids: list[int], num_requests: int, blocks: int) -> Step:
    ids = np.arange(num_requests * blocks, dtype=np.int32).reshape(num_requests, blocks)
    new = [
        NewRequest(
            request_id=index,
            token_ids=np.array(token_ids, dtype=np.int32),
            num_prompt_tokens=len(token_ids),
            num_computed_tokens=0,
            blocks=[Blocks(0, ids[index])] * len(runner.kv_groups),
            sampling=GREEDY,
        )
        for index in range(num_requests)
    ]
    return _step(runner, num_requests, len(token_ids), new=new)


def _decoding(runner: ModelRunner, num_requests: int, num_drafts: int) -> Step:
    return _step(runner, num_requests, 1 + num_drafts, num_drafts)


def _step(
    runner: ModelRunner, num_requests: int, num_tokens: int, num_drafts: int = 0, new: list[NewRequest] | None = None
) -> Step:
    return Step(
        step_id=0,
        request_ids=list(range(num_requests)),
        num_scheduled_tokens=np.full(num_requests, num_tokens),
        num_new_blocks=np.zeros((num_requests, len(runner.kv_groups)), dtype=np.int64),
        new_block_ids=np.empty(0, dtype=np.int32),
        new_requests=new or [],
        num_draft_tokens=np.full(num_requests, num_drafts) if num_drafts else None,
    )
