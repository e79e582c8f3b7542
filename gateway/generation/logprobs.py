"""Log probabilities of outputs in OpenAI's form, and of prompts in vLLM's."""

from collections.abc import Iterable, Sequence

from pagewire.gateway.core.reply import PendingChoice
from pagewire.gateway.schema.answers import ChatLogprob, ChatLogprobs, PromptEntries, PromptLogprob, TopLogprob
from pagewire.v1.inference_pb2 import PromptLogprobs, TokenLogprob

# JSON has no -Infinity; vLLM's and OpenAI's floor.
MIN_LOGPROB = -9999.0


def chat_logprobs(tokens: Iterable[TokenLogprob], as_ids: bool) -> ChatLogprobs:
    """Returns the log probabilities of tokens. as_ids: name tokens by their ids."""
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


def prompt_logprobs(found: PromptLogprobs | None, num_top: int) -> list[PromptEntries | None] | None:
    """Returns the entries of each token of the prompt, by token id."""
    if found is None:
        return None
    per_token, texts = found.logprobs.entries_per_token, list(found.tokens)
    ids, logprobs = list(found.logprobs.token_ids), [finite(logprob) for logprob in found.logprobs.logprobs]
    entries: list[PromptEntries | None] = [None]
    for start, rank in zip(range(0, len(ids), per_token), found.logprobs.ranks, strict=True):
        of_token = {str(ids[start]): PromptLogprob(logprobs[start], rank, texts[start])}
        for place in range(1, 1 + num_top):
            i = start + place
            of_token.setdefault(str(ids[i]), PromptLogprob(logprobs[i], place, texts[i]))
        entries.append(of_token)
    return entries


def logprobs_of_prompt(choice: PendingChoice, choices: Sequence[PendingChoice]) -> PromptLogprobs | None:
    """Returns the log probabilities of a choice's prompt, which only the first choice of a prompt has."""
    if choice.prompt_logprobs is not None:
        return choice.prompt_logprobs
    asked = (one for one in choices if one.prompt_logprobs is not None)
    return next((one.prompt_logprobs for one in asked if one.prompt_token_ids == choice.prompt_token_ids), None)


def token_name(token: TokenLogprob, as_id: bool) -> str:
    return f"token_id:{token.token_id}" if as_id else token.token


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
