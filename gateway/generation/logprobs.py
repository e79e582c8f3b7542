"""Log probabilities as clients know them: OpenAI's of chats, its columns of text completions, and vLLM's of prompts."""

from collections.abc import Iterable, Sequence

from pagewire.gateway.generation.reply import PendingChoice
from pagewire.gateway.schema.responses import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptEntries,
    PromptLogprob,
    TopLogprob,
)
from pagewire.v1.inference_pb2 import PromptLogprobs, TokenLogprob

# JSON has no -Infinity; vLLM's and OpenAI's floor.
MIN_LOGPROB = -9999.0


def chat_logprobs(tokens: Iterable[TokenLogprob], as_ids: bool) -> ChatLogprobs:
    """as_ids: tokens are named by their ids."""
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=_name(token, as_ids),
                logprob=_finite(token.logprob),
                bytes=list(token.token_bytes),
                top_logprobs=[
                    TopLogprob(
                        token=_name(other, as_ids), logprob=_finite(other.logprob), bytes=list(other.token_bytes)
                    )
                    for other in token.top_logprobs
                ],
            )
            for token in tokens
        ]
    )


def completion_logprobs(
    tokens: Iterable[TokenLogprob], as_ids: bool, offset: int = 0, before: CompletionLogprobs | None = None
) -> CompletionLogprobs:
    """Of the output. offset: characters that the choice's text begins with; before: what is told of these."""
    columns = before or _no_columns()
    for token in tokens:
        columns.tokens.append(_name(token, as_ids))
        columns.token_logprobs.append(_finite(token.logprob))
        columns.top_logprobs.append(
            {_name(other, as_ids): _finite(other.logprob) for other in (token, *token.top_logprobs)}
        )
        columns.text_offset.append(offset + token.text_offset)
    return columns


def echoed_logprobs(
    told: PromptLogprobs | None, prompt_token_ids: Sequence[int], num_top: int, as_ids: bool
) -> CompletionLogprobs:
    """Of the prompt that a text begins with. None: the request ended before it was computed."""
    columns = _no_columns()
    if told is None or not told.text_offsets:
        return columns
    columns.text_offset += told.text_offsets
    columns.token_logprobs.append(None)  # the first token follows nothing
    columns.top_logprobs.append(None)
    per_token, ids = told.logprobs.entries_per_token, list(told.logprobs.token_ids)
    names = [f"token_id:{token_id}" for token_id in ids] if as_ids else list(told.tokens)
    logprobs = [_finite(logprob) for logprob in told.logprobs.logprobs]
    for start in range(0, len(ids), per_token):
        end = start + 1 + num_top
        columns.token_logprobs.append(logprobs[start])
        columns.top_logprobs.append(dict(zip(names[start:end], logprobs[start:end], strict=True)))
    first = f"token_id:{prompt_token_ids[0]}" if as_ids else told.first_token
    columns.tokens += [first, *names[::per_token]]
    return columns


def prompt_logprobs(told: PromptLogprobs | None, num_top: int) -> list[PromptEntries | None] | None:
    """By token id, of each of the prompt's tokens."""
    if told is None:
        return None
    per_token, texts = told.logprobs.entries_per_token, list(told.tokens)
    ids, logprobs = list(told.logprobs.token_ids), [_finite(logprob) for logprob in told.logprobs.logprobs]
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


def _no_columns() -> CompletionLogprobs:
    return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


def _name(token: TokenLogprob, as_id: bool) -> str:
    return f"token_id:{token.token_id}" if as_id else token.token


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
