"""Drives a model runner with drafts, and the proposers that there are without a checkpoint of their own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu.engine.steps import WARM_UP_STEPS, Driver
from pagewire.services.executor.config.model_config import DecoderConfig
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.models.causal import CausalModel
from pagewire.services.executor.models.drafting.eagle3 import Eagle3Head
from pagewire.services.executor.models.protocol import Model, OwnModel
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.speculation.draft_model import DraftModel
from pagewire.services.executor.speculation.draft_steps import Target
from pagewire.services.executor.speculation.heads import HeadProposer
from pagewire.services.executor.speculation.ngram import NgramProposer
from pagewire.services.executor.speculation.quantized_copy import quantized_copy
from pagewire.services.executor.speculation.self_draft import SelfDraft
from pagewire.services.executor.step.step import StepOutput

METHODS = ("ngram", "self", "draft_model", "eagle3")


@dataclass(frozen=True)
class Drafted:
    """Steps of one batch with drafts; seconds are the host's, from result to result."""

    num_reqs: int
    step_seconds: float
    gained: float  # tokens of a request in a step, of those measured
    token_ids: list[list[int]]  # of each request, all steps

    @property
    def tokens_per_second(self) -> float:
        return self.num_reqs * self.gained / self.step_seconds


class DraftingDriver(Driver):
    """All blocks of a request are its own from the start, so that steps need not know what those before gained."""

    def drafted(self, counts: Sequence[int], num_steps: int, depth: int, *, is_fixed: bool = False) -> Drafted:
        """Steps of len(counts) requests, each with so many drafts, `depth` steps in flight. is_fixed: also where a
        proposer finds nothing."""
        self.runner.reset()
        requests, drafts = list(range(len(counts))), np.array(counts, dtype=np.int64)
        new = [self._request(index, self.prompt_len(index), computed=self.prompt_len(index) - 1) for index in requests]
        running: deque[StepOutput] = deque()
        tokens: list[list[int]] = [[] for _ in requests]
        gains, times = list[float](), list[float]()

        def take() -> None:
            host = running.popleft().wait()
            for mine, gained in zip(tokens, np.split(host.token_ids, host.num_tokens.cumsum()), strict=False):
                mine += gained.tolist()
            gains.append(float(host.num_tokens.mean()))
            times.append(time.perf_counter())

        for index in range(WARM_UP_STEPS + num_steps):
            running.append(self._run(requests, 1 + drafts, new if index == 0 else [], drafts=drafts, is_fixed=is_fixed))
            if len(running) == depth:
                take()
        while running:
            take()
        end = len(times) - depth + 1  # as of `Driver.decode`
        seconds = (times[end - 1] - times[WARM_UP_STEPS - 1]) / (end - WARM_UP_STEPS)
        return Drafted(len(counts), seconds, float(np.mean(gains[WARM_UP_STEPS:end])), tokens)


def proposer_of(method: str, num_drafts: int, small: Callable[[], Model]) -> Callable[[Target], Proposer]:
    """Returns a function that makes the proposer of a method. small: loads a model that drafts."""

    def make(target: Target) -> Proposer:
        if method == "ngram":
            return NgramProposer(num_drafts, 4, 1)
        if method == "self":
            assert isinstance(target.model, OwnModel)
            return SelfDraft(target, quantized_copy(target.model, 4), 4, num_drafts)
        if method == "draft_model":
            return DraftModel(target, small(), num_drafts, target.limits.max_model_len)
        return HeadProposer(target, random_head(target), num_drafts, target.limits.max_model_len)

    return make


def random_head(target: Target) -> Eagle3Head:
    """An EAGLE-3 head of the target's size, of which no draft is right."""
    model = target.model
    assert isinstance(model, CausalModel)
    config = model.config
    assert isinstance(config, DecoderConfig)
    raw = {
        "vocab_size": config.vocab_size,
        "draft_vocab_size": min(config.vocab_size, 32_000),
        "hidden_size": config.hidden_size,
        "intermediate_size": 4 * config.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "eagle_aux_hidden_state_layer_ids": [len(model.layers) // 2] * 3,
    }
    head = Eagle3Head(raw, model, target.limits.max_model_len, Placement(config.dtype, target.device))
    generator = torch.Generator(target.device).manual_seed(0)
    for name, memory in head.load_targets().items():
        if name.endswith("norm.weight"):
            memory.fill_(1.0)
        else:
            memory.normal_(0.0, memory.shape[-1] ** -0.5, generator=generator)
    return head
