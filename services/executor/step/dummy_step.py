"""Steps of dummy requests, for measuring, warming up and capturing."""

from __future__ import annotations

import numpy as np

from pagewire.config.sampling_params import with_defaults
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.step import Blocks, NewRequest, Step
from pagewire.v1.common_pb2 import SamplingParams

# A step without requests.
NO_STEP = Step(
    step_id=0,
    request_ids=[],
    num_scheduled_tokens=np.empty(0, dtype=np.int64),
    num_new_blocks=np.empty((0, 1), dtype=np.int64),
    new_block_ids=np.empty(0, dtype=np.int32),
)
DUMMY_SAMPLING = with_defaults(SamplingParams(seed=0, top_k=50, top_p=0.9))


def dummy_step(
    limits: Limits,
    num_groups: int,
    num_reqs: int,
    num_tokens: int,
    *,
    context_len: int,
    sampling: SamplingParams,
    num_draft_tokens: int,
    yields_vectors: bool,
) -> Step:
    """Returns a step of at most num_reqs requests and num_tokens tokens, all of which enter in it.

    The first requests are as long as possible, the others have one token each. The very first has up to context_len
    more tokens, as if computed before. Each also has num_draft_tokens drafts at its end. All write to block 0, which
    therefore must not be in use.
    """
    shortest = 1 + num_draft_tokens
    num_tokens = min(num_tokens, limits.max_num_batched_tokens)
    num_reqs = min(num_reqs, limits.max_num_seqs, num_tokens // shortest)
    lens, left = list[int](), num_tokens
    for others in reversed(range(num_reqs)):
        lens.append(min(left - others * shortest, limits.max_model_len - 1))
        left -= lens[-1]
    context_lens = [min(context_len, limits.max_model_len - 1 - lens[0]), *[0] * (num_reqs - 1)]
    return Step(
        step_id=0,
        request_ids=list(range(num_reqs)),
        num_scheduled_tokens=np.array(lens, dtype=np.int64),
        num_draft_tokens=np.full(num_reqs, num_draft_tokens, dtype=np.int64),
        has_fixed_drafts=True,
        num_new_blocks=np.zeros((num_reqs, num_groups), dtype=np.int64),
        new_block_ids=np.empty(0, dtype=np.int32),
        new_requests=[
            NewRequest(
                request_id=index,
                token_ids=np.zeros(context + length - num_draft_tokens, dtype=np.int32),
                num_prompt_tokens=context + length - num_draft_tokens,
                num_computed_tokens=context,
                blocks=[_blocks(context + length, limits)] * num_groups,
                sampling=sampling,
                yields_vector=yields_vectors,
            )
            for index, (context, length) in enumerate(zip(context_lens, lens, strict=True))
        ],
    )


def _blocks(num_tokens: int, limits: Limits) -> Blocks:
    return Blocks(0, np.zeros(-(-num_tokens // limits.block_size), dtype=np.int32))
