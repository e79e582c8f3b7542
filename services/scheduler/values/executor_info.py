"""The facts that an executor reports about itself."""

from dataclasses import dataclass, replace

from pagewire.v1.executor_pb2 import KVTier


@dataclass(frozen=True, slots=True)
class KVGroup:
    """The KV cache of a group of layers."""

    num_blocks: int
    window: int = 0  # tokens that a query sees, itself included; 0 = all
    state_tokens: int = 0  # tokens per block, if blocks hold states; 0 = blocks hold the KV of each token
    block_bytes: int = 0

    @property
    def is_state(self) -> bool:
        return self.state_tokens > 0

    @property
    def keeps_all(self) -> bool:
        """True if a request holds blocks for all of its tokens."""
        return not self.window and not self.is_state


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of an executor, like `Weights` of executor.proto."""

    version: str = ""
    number: int = 0
    model: str = ""
    revision: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank adapter of the model, like `Adapter` of common.proto."""

    name: str
    path: str = ""
    digest: str = ""
    rank: int = 0
    base_model: str = ""
    number: int = 0
    problem: str = ""

    @property
    def label(self) -> str:
        """The name for messages: it may have lost its own."""
        return self.name or self.digest[:12]


@dataclass(frozen=True, slots=True)
class FoundAdapter:
    """An adapter in the directory of an executor, like `FoundAdapter` of executor.proto."""

    name: str
    path: str
    digest: str = ""
    problem: str = ""
    changed_at: int = 0


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """A way to draft, like `DraftMethod` of executor.proto."""

    name: str
    rounds: tuple[tuple[int, float], ...] = ()  # (requests, seconds) for a draft of each, requests rising
    comes_later: bool = False


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """The model of an executor, and its capacity."""

    incarnation: int
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_logprobs: int
    kv_groups: tuple[KVGroup, ...]
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_draft_tokens: int = 0  # per request and step
    kind: int = 0  # a ModelKind; 0 = text
    labels: tuple[str, ...] = ()  # of a classifier
    vector_size: int = 0
    whole_prompts: bool = False  # a prompt is computed in one step, without a prefix hit
    weights: Weights = Weights()
    predecessor_failed: bool = False  # False also if unknown
    pipeline_stages: int = 1  # of its layers
    num_ranks: int = 1  # processes
    decode_costs: tuple[tuple[int, float], ...] = ()  # (tokens, seconds) of steps without prompts, tokens rising
    draft_methods: tuple[DraftMethod, ...] = ()
    draft_bounds: tuple[tuple[int, int], ...] = ()  # (decoding requests, most drafts of each from there on)
    max_adapters: int = 0  # slots
    adapters: tuple[Adapter, ...] = ()  # that can be put into a slot
    adapter_directory: str = ""  # in which it looks for others
    kv_tiers: tuple[KVTier, ...] = ()  # the fastest first
    kv_format: str = ""  # executors with the same one may read each other's blocks
    found_adapters: tuple[FoundAdapter, ...] = ()
    role: str = "both"  # or prefill, decode
    reset_at: int = 0  # the latest reset of prefixes that its tiers have followed, Unix time, nanoseconds

    @property
    def max_num_tokens(self) -> int:
        """The most tokens of a request, prompt plus output, that the model and the KV cache allow. (The executor has
        checked that windows and states fit.)"""
        capacities = [group.num_blocks * self.block_size for group in self.kv_groups if group.keeps_all]
        return min([self.max_model_len, *capacities])

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the largest group."""
        return max((group.num_blocks for group in self.kv_groups), default=0)

    def max_prompt_tokens(self, yields_vector: bool) -> int:
        """Returns the most tokens of a prompt: unless it yields a vector, one token is left for the output."""
        return self.max_num_tokens if yields_vector else self.max_num_tokens - 1

    def within_steps_of(self, max_num_batched_tokens: int | None) -> "ExecutorInfo":
        """Applies the scheduler's limit of tokens per step: if prompts are computed in one step, none is longer than
        that."""
        if max_num_batched_tokens is None or not self.whole_prompts:
            return self
        return replace(self, max_model_len=min(self.max_model_len, max_num_batched_tokens))

    def is_interchangeable_with(self, other: "ExecutorInfo") -> bool:
        """Returns whether a request of this executor may continue on the other one: model, limits and block size must
        be equal. The numbers of rows and of tokens per step may differ, and so may the weights during a replacement."""
        if self.weights.number == other.weights.number and self.weights.version != other.weights.version:
            return False
        return _of_requests(self) == _of_requests(other)


def _of_requests(info: ExecutorInfo) -> tuple[object, ...]:
    return (
        info.model,
        info.vocab_size,
        info.eos_token_ids,
        info.max_logprobs,
        info.max_model_len,
        info.max_num_tokens,
        info.block_size,
        info.kind,
        info.labels,
        info.vector_size,
        info.whole_prompts,
    )
