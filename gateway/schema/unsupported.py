"""Parameters that other servers know and this one does not take yet: refused by name, never ignored."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from pagewire.gateway.errors import ApiError

# Name -> values that ask for nothing (null always does). Clients send them without being asked.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "lora_path": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_retention": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": (),
    "vllm_xargs": (),
    "web_search_options": (),
}

# Asked for inside a message or one of its parts.
UNSUPPORTED_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
}


def check_names(
    data: Mapping[str, Any],
    known: Collection[str],
    unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED,
    where: str = "",
) -> dict[str, Any]:
    """`data` without the unsupported parameters that ask for nothing.

    Raises ApiError 400 for one that asks for something, and for unknown ones with the nearest known name.
    """
    kept = {}
    for name, value in data.items():
        if name in known:
            kept[name] = value
        elif name not in unsupported:
            raise _unknown(name, [*known, *unsupported], where)
        elif value is not None and not any(value == v and type(value) is type(v) for v in unsupported[name]):
            default = f" (only {unsupported[name][0]!r} or null)" if unsupported[name] else ""
            param = where + name
            raise ApiError(
                400, f"parameter {param!r} is not supported yet{default}", param=param, code="unsupported_parameter"
            )
    return kept


def _unknown(name: str, names: list[str], where: str) -> ApiError:
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return ApiError(400, f"unknown parameter {where + name!r}{hint}", param=where + name, code="unknown_parameter")
