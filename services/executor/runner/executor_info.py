"""Facts about an executor, found at start and reported to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.services.executor.batch.kv_cache import KVGroup


@dataclass(frozen=True)
class DraftMethod:
    """The measured cost of a way to draft.

    rounds: (requests, seconds) of rounds in which each of the requests gets one draft, by ascending requests.
    comes_later: finds no drafts until it is prepared.
    """

    name: str
    rounds: tuple[tuple[int, float], ...] = ()
    comes_later: bool = False


@dataclass(frozen=True)
class DecodeCosts:
    """The measured cost of a step by its tokens; the scheduler weighs drafts against it.

    steps: (tokens, seconds), by ascending tokens. methods: those of the proposer, in its order.
    """

    steps: tuple[tuple[int, float], ...] = ()
    methods: tuple[DraftMethod, ...] = ()


NO_COSTS = DecodeCosts()


@dataclass(frozen=True)
class ExecutorInfo:
    """The answer to `Describe`, apart from the weights in force."""

    incarnation: int
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_groups: tuple[KVGroup, ...]
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str
    dtype: str
    weight_bytes: int
    kv_cache_bytes: int
    max_draft_tokens: int = 0
    decode_costs: DecodeCosts = NO_COSTS  # measured if the number of drafts adapts to the load
    draft_bounds: tuple[tuple[int, int], ...] = ()  # (least number of decoding requests, drafts of each at most)
    kind: str = "generate"  # or embed, classify
    labels: tuple[str, ...] = ()  # of a classifier
    vector_size: int = 0
    whole_prompts: bool = False  # a prompt must be in one step
    predecessor_failed: bool = False
    pipeline_stages: int = 1
    num_ranks: int = 1
    weights_digest: str = ""  # of the weights at start
    role: str = "both"  # or prefill, decode
    cache_size: int = 0  # blocks, as --num-gpu-blocks-override

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the largest group."""
        return max((group.num_blocks for group in self.kv_groups), default=0)
