"""Token counts of an answer."""

from collections.abc import Sequence

from pagewire.gateway.core.reply import PendingChoice
from pagewire.gateway.schema.answers import CompletionTokensDetails, PromptTokensDetails, UsageInfo


class UsageTotal:
    """The token counts of an answer, from the cumulative counts of its generations."""

    def __init__(
        self, generations: Sequence[PendingChoice], choices_per_prompt: int, *, counts_output: bool = True
    ) -> None:
        """
        Args:
            generations: those of one prompt are neighbors; each prompt counts once.
            choices_per_prompt: number of neighbors with the same prompt.
            counts_output: false if the client requested no output.
        """
        self._generations = generations
        self._choices_per_prompt = choices_per_prompt
        self._counts_output = counts_output

    @property
    def prompt_tokens(self) -> int:
        return sum(one.usage.prompt_tokens for one in self._generations[:: self._choices_per_prompt])

    @property
    def completion_tokens(self) -> int:
        return sum(one.usage.completion_tokens for one in self._generations) if self._counts_output else 0

    @property
    def cached_tokens(self) -> int:
        return sum(one.usage.cached_tokens for one in self._generations[:: self._choices_per_prompt])

    @property
    def reasoning_tokens(self) -> int:
        return sum(one.usage.reasoning_tokens for one in self._generations)

    def info(self) -> UsageInfo:
        prompt_tokens, completion_tokens = self.prompt_tokens, self.completion_tokens
        return UsageInfo(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=self.reasoning_tokens),
        )
