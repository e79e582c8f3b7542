"""Log probabilities as OpenAI's legacy columns, of outputs and of prompts that are echoed."""

from collections.abc import Iterable, Sequence

from pagewire.gateway.completions.bodies import CompletionLogprobs
from pagewire.gateway.generation.logprobs import finite, token_name
from pagewire.v1.inference_pb2 import PromptLogprobs, TokenLogprob


def completion_logprobs(
    tokens: Iterable[TokenLogprob], as_ids: bool, offset: int = 0, before: CompletionLogprobs | None = None
) -> CompletionLogprobs:
    """Returns the columns of an output.

    Args:
        offset: characters before it in the choice's text.
        before: the columns of these characters, which are extended.
    """
    columns = before or _no_columns()
    for token in tokens:
        columns.tokens.append(token_name(token, as_ids))
        columns.token_logprobs.append(finite(token.logprob))
        columns.top_logprobs.append(
            _by_name((token_name(other, as_ids), finite(other.logprob)) for other in (token, *token.top_logprobs))
        )
        columns.text_offset.append(offset + token.text_offset)
    return columns


def echoed_logprobs(
    found: PromptLogprobs | None, prompt_token_ids: Sequence[int], num_top: int, as_ids: bool
) -> CompletionLogprobs:
    """Returns the columns of an echoed prompt. found: None if the request ended before the prompt was computed."""
    columns = _no_columns()
    if found is None or not found.text_offsets:
        return columns
    columns.text_offset += found.text_offsets
    columns.token_logprobs.append(None)  # the first token follows nothing
    columns.top_logprobs.append(None)
    per_token, ids = found.logprobs.entries_per_token, list(found.logprobs.token_ids)
    names = [f"token_id:{token_id}" for token_id in ids] if as_ids else list(found.tokens)
    logprobs = [finite(logprob) for logprob in found.logprobs.logprobs]
    for start in range(0, len(ids), per_token):
        end = start + 1 + num_top
        columns.token_logprobs.append(logprobs[start])
        columns.top_logprobs.append(_by_name(zip(names[start:end], logprobs[start:end], strict=True)))
    first = f"token_id:{prompt_token_ids[0]}" if as_ids else found.first_token
    columns.tokens += [first, *names[::per_token]]
    return columns


def _by_name(entries: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Returns log probabilities by the text of their tokens, the chosen token's first. Of several tokens with the same
    text the first counts, which is the chosen or the more probable one."""
    by_name: dict[str, float] = {}
    for name, logprob in entries:
        by_name.setdefault(name, logprob)
    return by_name


def _no_columns() -> CompletionLogprobs:
    return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
