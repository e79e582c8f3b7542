"""What an executor says about itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """Its model and its capacity."""

    incarnation: int
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_logprobs: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_draft_tokens: int = 0  # per request and step

    @property
    def max_num_tokens(self) -> int:
        """Longest request, prompt plus output, that the model takes and the KV cache can hold."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    def is_interchangeable_with(self, other: "ExecutorInfo") -> bool:
        """Whether a request that was let in here may go on there: model, limits and block size are the same. How many
        requests and tokens each takes at once may differ."""
        return _of_requests(self) == _of_requests(other)


def _of_requests(info: ExecutorInfo) -> tuple[object, ...]:
    return (
        *(info.model, info.vocab_size, info.eos_token_ids, info.max_logprobs),
        *(info.max_model_len, info.max_num_tokens, info.block_size),
    )
