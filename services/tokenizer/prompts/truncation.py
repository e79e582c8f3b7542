"""Truncation of prompts by truncate_prompt_tokens."""

import grpc

from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.pool.text_limit import Room
from pagewire.services.tokenizer.prompts.prompts import Prompt
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire.rpc import RpcError


def room_for(request: inference_pb2.GenerateRequest, params: common_pb2.SamplingParams, max_model_len: int) -> Room:
    """Returns how much of the prompt is kept; no more of its text has to be encoded.

    params: of the request, with defaults. max_model_len: 0 = not known yet. Raises RpcError (INVALID_ARGUMENT,
    UNAVAILABLE).
    """
    if not request.HasField("truncate_prompt_tokens"):
        return Room(max_model_len, counts=max_model_len > 0)
    most = _num_kept(request.truncate_prompt_tokens, params, max_model_len)
    return Room(most, keeps="start" if request.truncate_end else "end")


def truncated(prompt: Prompt, room: Room) -> Prompt:
    """Returns the part of an encoded prompt that is kept. Raises RpcError (INVALID_ARGUMENT) if it has images."""
    if room.keeps == "all":
        return prompt
    if prompt.images:
        raise invalid(
            "truncate_prompt_tokens cannot cut a prompt with images; leave out one of them", "truncate_prompt_tokens"
        )
    if len(prompt.token_ids) <= room.most:
        return prompt
    return Prompt(prompt.token_ids[: room.most] if room.keeps == "start" else prompt.token_ids[-room.most :])


def _num_kept(wanted: int, params: common_pb2.SamplingParams, max_model_len: int) -> int:
    if wanted != -1:
        if wanted < 1 or 0 < max_model_len < wanted:
            valid = f"within 1..{max_model_len}" if max_model_len else "at least 1"
            raise invalid(f"truncate_prompt_tokens is {wanted}; it must be -1 or {valid}", "truncate_prompt_tokens")
        return wanted
    if not max_model_len:
        raise RpcError(grpc.StatusCode.UNAVAILABLE, "the model is not loaded yet; try again later")
    max_tokens = max(1, params.max_tokens)
    if max_tokens >= max_model_len:
        raise invalid(
            f"max_tokens is {max_tokens} and the model takes {max_model_len} tokens, which leaves none for the prompt; "
            "lower max_tokens, or set truncate_prompt_tokens to a number",
            "truncate_prompt_tokens",
        )
    return max_model_len - max_tokens
