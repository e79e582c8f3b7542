"""The bounds of a step."""

from pagewire.config import SchedulerConfig
from pagewire.errors import InvalidRequest
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.services.scheduler.values.request import Request


class StepLimits:
    """The bounds of every step: the smaller of the configured limit and that of the executor."""

    def __init__(self, config: SchedulerConfig, info: ExecutorInfo | None) -> None:
        """info: None without an executor; then no request fits."""
        self.max_num_seqs = 0
        self.max_num_batched_tokens = 0
        self._max_draft_tokens = 0 if info is None else info.max_draft_tokens
        self._whole_prompts = info is not None and info.whole_prompts
        self._enable_chunked_prefill = config.enable_chunked_prefill and not self._whole_prompts
        self._long_prefill_token_threshold = config.long_prefill_token_threshold
        self.max_num_partial_prefills = config.max_num_partial_prefills
        self.max_long_partial_prefills = config.max_long_partial_prefills
        self.max_running_per_tenant = config.max_running_per_tenant
        if info is not None:
            self.max_num_batched_tokens = min(
                config.max_num_batched_tokens or info.max_num_batched_tokens, info.max_num_batched_tokens
            )
            # With one token per running request within the budget, no running request ever starves.
            self.max_num_seqs = min(
                config.max_num_seqs or info.max_num_seqs, info.max_num_seqs, self.max_num_batched_tokens
            )

    @property
    def splits_prompts(self) -> bool:
        return self._enable_chunked_prefill

    @property
    def long_prompt_tokens(self) -> int:
        """The number of tokens to compute beyond which a prompt is long."""
        return self._long_prefill_token_threshold or self.max_num_batched_tokens // 4

    def chunk(self, num_new_tokens: int, budget: int, is_alone: bool) -> int:
        """Returns how many of a prefill's missing tokens to compute in this step; 0: none for now. is_alone: no other
        request would be delayed by a long chunk."""
        if not self._enable_chunked_prefill:
            return 0 if budget < num_new_tokens <= self.max_num_batched_tokens else min(num_new_tokens, budget)
        threshold = self._long_prefill_token_threshold
        if 0 < threshold < num_new_tokens and not is_alone:
            num_new_tokens = threshold
        return min(num_new_tokens, budget)

    def draft_budget(self, num_running: int) -> int:
        """Returns how many tokens of a step may be drafts: half of those that remain after one token for each running
        request. The other half is for prompts."""
        return (self.max_num_batched_tokens - num_running) // 2 if self._max_draft_tokens else 0

    def check(self, request: Request) -> None:
        """Raises InvalidRequest if the prompt never fits."""
        num_prompt_tokens = request.num_prompt_tokens
        if not self._enable_chunked_prefill and num_prompt_tokens > self.max_num_batched_tokens:
            raise InvalidRequest(
                f"the prompt has {num_prompt_tokens} tokens, but one step computes at most "
                f"{self.max_num_batched_tokens} and {self._why_whole()}",
                "prompt_token_ids",
            )

    def _why_whole(self) -> str:
        if self._whole_prompts:
            return "the model reads prompts whole; shorten the prompt or raise --max-num-batched-tokens"
        return (
            "chunked prefill is off; shorten the prompt, raise --max-num-batched-tokens or set --enable-chunked-prefill"
        )
