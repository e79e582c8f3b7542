"""Parts of answers that several APIs share: finish reasons, usage and log probabilities."""

from typing import Literal

from pagewire.gateway.core.body import Body

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
StopReason = int | str | None
"""The stop string or stop token that ended a generation (an extension of OpenAI's format)."""


class PromptTokensDetails(Body):
    cached_tokens: int


class CompletionTokensDetails(Body):
    """`reasoning_tokens`: tokens of the reasoning, without its marks."""

    reasoning_tokens: int


class UsageInfo(Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PromptLogprob(Body):
    """One token of a prompt, or an alternative to it. `rank`: in the vocabulary, 1 = most probable."""

    logprob: float
    rank: int
    decoded_token: str


PromptEntries = dict[str, PromptLogprob]
"""Token id -> a token of the prompt, or an alternative to it."""


class TopLogprob(Body):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Body):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Body):
    content: list[ChatLogprob]
    refusal: None = None
