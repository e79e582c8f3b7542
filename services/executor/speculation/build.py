"""The proposer that a configuration asks for."""

from __future__ import annotations

import torch

from pagewire.config.speculation import Speculation
from pagewire.errors import StartupError
from pagewire.services.executor.parallel.group import Group
from pagewire.services.executor.parallel.stage import WHOLE
from pagewire.services.executor.pooling import Pooling
from pagewire.services.executor.speculation.ngram import NgramProposer
from pagewire.services.executor.speculation.proposer import Proposer
from pagewire.services.executor.speculation.suffix import SuffixProposer


def make_proposer(
    speculation: Speculation | None, pooling: Pooling, device: torch.device, group: Group
) -> Proposer | None:
    """None: nothing is to be drafted. Raises StartupError for what cannot be drafted here."""
    if speculation is None:
        return None
    if not pooling.generates:
        raise StartupError(
            "--speculative-config: the model is served for vectors, of which nothing can be drafted; leave it out"
        )
    if group.stage is not WHOLE:
        raise StartupError(
            "--speculative-config with --pipeline-parallel-size: only the last stage knows which drafts were right; "
            "leave one of them out, or share the layers with --tensor-parallel-size instead"
        )
    if speculation.method == "ngram":
        bounds = speculation.prompt_lookup_max, speculation.prompt_lookup_min
        return NgramProposer(speculation.num_speculative_tokens, *bounds)
    if speculation.method == "suffix":
        if device.type != "cpu":
            raise StartupError(
                "--speculative-config: method suffix looks outputs up on the host, which would wait for a GPU; "
                "use method ngram, or --device cpu"
            )
        return SuffixProposer(
            speculation.num_speculative_tokens,
            max_depth=speculation.suffix_decoding_max_tree_depth,
            max_requests=speculation.suffix_decoding_max_cached_requests,
            factor=speculation.suffix_decoding_max_spec_factor,
            min_probability=speculation.suffix_decoding_min_token_prob,
        )
    raise StartupError(f"--speculative-config: method {speculation.method} is not supported on {device.type}")
