"""Assembles a model runner with every feature: fills the seams of `runner`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pagewire.services.executor.batch.images.image_inputs import ImageInputs
from pagewire.services.executor.grammar.constrained_drafts import ConstrainedDrafts
from pagewire.services.executor.grammar.constraints import GrammarConstraints
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.prompt_logprobs import PromptLogprobs
from pagewire.services.executor.runner.proposer import NO_DRAFTS, Proposer
from pagewire.services.executor.runner.stage import NO_EXCHANGE, StageExchange
from pagewire.services.executor.sampling.logprobs import LogprobsMode
from pagewire.services.executor.sampling.tokens import OWN_TOKENS, Tokens
from pagewire.services.executor.step.limits import Limits


def assemble(
    model: Model,
    limits: Limits,
    num_blocks: int,
    device: torch.device,
    *,
    proposer: Proposer | None = None,
    tokens: Tokens = OWN_TOKENS,
    stage: StageExchange = NO_EXCHANGE,
    image_cache_bytes: int = 0,
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    make: Callable[..., ModelRunner] = ModelRunner,
    **others: Any,
) -> ModelRunner:
    """Makes a runner for requests with grammars, images and scored prompts; `others` are passed to it unchanged.

    proposer: drafts tokens; None: no step has drafts. image_cache_bytes: see `ImageInputs`. make: the runner's class.
    """
    constraints = GrammarConstraints(limits.max_num_seqs, model.config.vocab_size)
    drafts = NO_DRAFTS
    if proposer is not None:
        is_alone = tokens is OWN_TOKENS and stage is NO_EXCHANGE
        drafts = ConstrainedDrafts(proposer, constraints, device, is_alone=is_alone)
    return make(
        model,
        limits,
        num_blocks,
        device,
        proposer=drafts,
        tokens=tokens,
        stage=stage,
        constraints=constraints,
        images=ImageInputs(model, device, image_cache_bytes),
        prompt_scores=PromptLogprobs(model, device, logprobs_mode),
        logprobs_mode=logprobs_mode,
        **others,
    )
