"""Log probabilities of a prompt as text: its tokens, their alternatives, and their places."""

from collections.abc import Sequence

from pagewire.services.tokenizer.output.detokenizer import Detokenizer, Detokenizers
from pagewire.v1 import common_pb2, inference_pb2


def prompt_logprobs(
    detokenizers: Detokenizers,
    columns: common_pb2.Logprobs,
    token_ids: Sequence[int],
    text: str | None,
    *,
    skip_special_tokens: bool,
) -> inference_pb2.PromptLogprobs:
    """Returns the message for the client.

    columns: the log probabilities of all token_ids except the first. text: that of the prompt, if the client gave it;
    otherwise it is decoded, with or without special tokens.
    """
    own_texts = {token_id: detokenizers.token_text(token_id) for token_id in {token_ids[0], *columns.token_ids}}
    prompt_text, offsets = _located(detokenizers, token_ids, text, skip_special_tokens)
    return inference_pb2.PromptLogprobs(
        logprobs=columns,
        tokens=[own_texts[token_id] for token_id in columns.token_ids],
        first_token=own_texts[token_ids[0]],
        text=prompt_text,
        text_offsets=offsets,
    )


def _located(
    detokenizers: Detokenizers, token_ids: Sequence[int], text: str | None, skip_special_tokens: bool
) -> tuple[str, list[int]]:
    """Returns the prompt's text and the place in it where each token begins."""
    if text is not None:
        decoded, offsets = _decoded(detokenizers.make(skip_special_tokens=False), token_ids)
        # Added tokens (BOS) stand before it. Otherwise the prompt was cut, or its tokens lose some of the text.
        if decoded.endswith(text):
            return text, [max(0, offset - len(decoded) + len(text)) for offset in offsets]
    return _decoded(detokenizers.make(skip_special_tokens=skip_special_tokens), token_ids)


def _decoded(detokenizer: Detokenizer, token_ids: Sequence[int]) -> tuple[str, list[int]]:
    text, offsets, num_chars = [], [], 0
    for token_id in token_ids:
        offsets.append(num_chars + detokenizer.num_held(token_id))
        text.append(detokenizer.push(token_id))
        num_chars += len(text[-1])
    return "".join(text) + detokenizer.flush(), offsets
