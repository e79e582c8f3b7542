"""The proposer that a configuration asks for."""

from __future__ import annotations

import torch

from pagewire.config.speculation import Speculation
from pagewire.config.values import drafts
from pagewire.errors import StartupError
from pagewire.services.executor.batch import kv_cache
from pagewire.services.executor.models.drafting.draft_head import DraftHead
from pagewire.services.executor.models.pooling import Pooling
from pagewire.services.executor.models.protocol import Model, OwnModel
from pagewire.services.executor.parallel.group import Group
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.speculation.draft_model import DraftModel
from pagewire.services.executor.speculation.draft_steps import Target
from pagewire.services.executor.speculation.heads import HeadProposer
from pagewire.services.executor.speculation.ngram import NgramProposer
from pagewire.services.executor.speculation.self_draft import IdleSelfDraft, SelfDraft
from pagewire.services.executor.speculation.several import SeveralProposers
from pagewire.services.executor.speculation.suffix import SuffixProposer


def why_not(model: Model, pooling: Pooling, group: Group, device: torch.device) -> str:
    """Returns why method auto drafts nothing; "" if it drafts."""
    vectors, state = not pooling.generates, kv_cache.has_state(model)
    return drafts.why_not(vectors=vectors, state=state, stages=group.stage.count, on_cuda=device.type != "cpu")


def make_proposer(
    speculation: Speculation | None, pooling: Pooling, group: Group, target: Target, drafter: Model | None
) -> Proposer | None:
    """Returns the proposer, or None if nothing is drafted. drafter: see `drafters.load_drafter`. Raises StartupError
    for a method that does not work with this setup."""
    if speculation is None:
        return None
    if not pooling.generates:
        raise StartupError(drafts.of_vectors())
    if kv_cache.has_state(target.model):
        raise StartupError(drafts.of_state(target.model.config.architecture))
    drafts.check(speculation, group.tensor.size, group.stage.count, on_cuda=target.device.type != "cpu")
    most = speculation.num_speculative_tokens
    if speculation.method == "ngram":
        lookup = NgramProposer(most, speculation.prompt_lookup_max, speculation.prompt_lookup_min)
        if not isinstance(drafter, OwnModel):
            return lookup
        return SeveralProposers([lookup, IdleSelfDraft(target, drafter, drafts.DEFAULT_BITS, most)])
    if speculation.method == "suffix":
        return SuffixProposer(
            most,
            max_depth=speculation.suffix_decoding_max_tree_depth,
            max_requests=speculation.suffix_decoding_max_cached_requests,
            factor=speculation.suffix_decoding_max_spec_factor,
            min_probability=speculation.suffix_decoding_min_token_prob,
        )
    if speculation.method == "self" and isinstance(drafter, OwnModel):
        return SelfDraft(target, drafter, drafts.bits_of(speculation.model), most)
    if speculation.method == "draft_model" and drafter is not None:
        longest = speculation.max_model_len or drafter.config.max_position_embeddings
        return DraftModel(target, drafter, most, min(longest, target.limits.max_model_len))
    if isinstance(drafter, DraftHead):
        return HeadProposer(target, drafter, most, target.limits.max_model_len)
    raise AssertionError(f"method {speculation.method} has no drafter")
