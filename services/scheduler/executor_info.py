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
