"""Requests that fill in the middle of a text."""

from collections.abc import Collection, Sequence

from pagewire.files.tokenizer_files.fill_in_middle import FillInMiddle
from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.received import Received


def infill_end_ids(
    received: Received, fill: FillInMiddle | None, model: str, own_end_ids: Collection[int]
) -> Sequence[int]:
    """Returns the tokens that end the output besides `own_end_ids`, the model's, if it is to fill in the middle of a
    text. fill: how the model does it. Raises RpcError (INVALID_ARGUMENT)."""
    request = received.request
    if not request.suffix:
        return ()
    if fill is None:
        raise invalid(f"suffix: {model} has no tokens for filling in the middle of a text; leave suffix out", "suffix")
    is_resumed = received.resubmitted or received.resume_token_ids
    if request.WhichOneof("prompt") != "text" and not is_resumed:
        raise invalid("suffix needs the prompt as a text; give one, or leave suffix out", "suffix")
    if request.HasField("truncate_prompt_tokens"):
        raise invalid("suffix cannot be combined with truncate_prompt_tokens; leave out one of them", "suffix")
    given = received.given
    others = (token_id for token_id in fill.end_token_ids if token_id not in own_end_ids)
    return () if given.ignore_eos else [token_id for token_id in others if token_id not in given.stop_token_ids]
