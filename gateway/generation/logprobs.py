"""Log probabilities as clients know them: OpenAI's of chats, and vLLM's of prompts."""

from collections.abc import Iterable, Sequence

from pagewire.gateway.core.reply import PendingChoice
from pagewire.gateway.schema.answers import ChatLogprob, ChatLogprobs, PromptEntries, PromptLogprob, TopLogprob
from pagewire.v1.inference_pb2 import PromptLogprobs, TokenLogprob

# JSON has no -Infinity; vLLM's and OpenAI's floor.
MIN_LOGPROB = -9999.0


def chat_logprobs(tokens: Iterable[TokenLogprob], as_ids: bool) -> ChatLogprobs:
    """as_ids: tokens are named by their ids."""
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=token_name(token, as_ids),
                logprob=finite(token.logprob),
                bytes=list(token.token_bytes),
                top_logprobs=[
                    TopLogprob(
                        token=token_name(other, as_ids), logprob=finite(other.logprob), bytes=list(other.token_bytes)
                    )
                    for other in token.top_logprobs
                ],
            )
            for token in tokens
        ]
    )


def prompt_logprobs(told: PromptLogprobs | None, num_top: int) -> list[PromptEntries | None] | None:
    """By token id, of each of the prompt's tokens."""
    if told is None:
        return None
    per_token, texts = told.logprobs.entries_per_token, list(told.tokens)
    ids, logprobs = list(told.logprobs.token_ids), [finite(logprob) for logprob in told.logprobs.logprobs]
    entries: list[PromptEntries | None] = [None]
    for start, rank in zip(range(0, len(ids), per_token), told.logprobs.ranks, strict=True):
        of_token = {str(ids[start]): PromptLogprob(logprobs[start], rank, texts[start])}
        for place in range(1, 1 + num_top):
            i = start + place
            of_token.setdefault(str(ids[i]), PromptLogprob(logprobs[i], place, texts[i]))
        entries.append(of_token)
    return entries


def told_of_prompt(choice: PendingChoice, choices: Sequence[PendingChoice]) -> PromptLogprobs | None:
    """What one of the choices of the same prompt was told: the first one asks for all."""
    if choice.prompt_logprobs is not None:
        return choice.prompt_logprobs
    asked = (one for one in choices if one.prompt_logprobs is not None)
    return next((one.prompt_logprobs for one in asked if one.prompt_token_ids == choice.prompt_token_ids), None)


def token_name(token: TokenLogprob, as_id: bool) -> str:
    return f"token_id:{token.token_id}" if as_id else token.token


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
