"""Parameters that other servers know and this one does not take yet: refused by name, never ignored."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from pagewire.gateway.errors import ApiError

# Of a body's schema: the parameters that it refuses, and why.
REFUSED = "x-refused"


class Refused(NamedTuple):
    """Why a parameter is refused. Values that ask for nothing are taken (null always is): clients send them unasked."""

    why: str
    harmless: tuple[Any, ...] = ()


_CHAT_ONLY = "it is for chats"
_TOOLS = "it is the older form of tools"
_BEAMS = "beam search is not there"
_IMAGES = "images are read as the server's flags say"

UNSUPPORTED: Mapping[str, Refused] = {
    "audio": Refused("no model here speaks"),
    "best_of": Refused("ask for n, with logprobs, and choose", (1,)),
    "chat_template": Refused("a template is a program"),
    "documents": Refused(_CHAT_ONLY, ([],)),
    "function_call": Refused(_TOOLS, ("none",)),
    "functions": Refused(_TOOLS, ([],)),
    "include_reasoning": Refused(_CHAT_ONLY),
    "kv_transfer_params": Refused("KV is not transferred between servers"),
    "length_penalty": Refused(_BEAMS, (1, 1.0)),
    "logprob_token_ids": Refused("ask for more alternatives (logprobs), or score a text (echo)", ([],)),
    "logits_processors": Refused("requests carry no code", ([],)),
    "lora_path": Refused("there are no LoRA adapters"),
    "mm_processor_kwargs": Refused(_IMAGES),
    "modalities": Refused("answers are text", (["text"],)),
    "parallel_tool_calls": Refused(_CHAT_ONLY, (True, False)),
    "prediction": Refused("outputs are not predicted"),
    "prompt_cache_retention": Refused("the prefix cache keeps what it has room for"),
    "prompt_embeds": Refused("prompts are text or token ids"),
    "reasoning_effort": Refused(_CHAT_ONLY),
    "service_tier": Refused("all requests are equal; see priority", ("auto", "default")),
    "spaces_between_special_tokens": Refused("special tokens are written as they are", (True,)),
    "store": Refused("chats are not stored", (False,)),
    "suffix": Refused("no model here fills in the middle", ("",)),
    "tool_choice": Refused(_CHAT_ONLY, ("none",)),
    "tools": Refused(_CHAT_ONLY, ([],)),
    "use_beam_search": Refused(_BEAMS, (False,)),
    "verbosity": Refused("no template here knows it"),
    "vllm_xargs": Refused("there are no plug-ins"),
    "web_search_options": Refused("nothing is searched"),
}

# Asked for inside a message or one of its parts.
UNSUPPORTED_IN_MESSAGE: Mapping[str, Refused] = {
    "annotations": Refused("no template shows them", ([],)),
    "audio": Refused("no model here speaks"),
    "function_call": Refused(_TOOLS),
    "refusal": Refused("no template shows it"),
}


def check_names(
    data: Mapping[str, Any],
    known: Collection[str],
    unsupported: Mapping[str, Refused] = UNSUPPORTED,
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
        elif value is not None and not _asks_for_nothing(value, unsupported[name]):
            param, refused = where + name, unsupported[name]
            default = f" (only {refused.harmless[0]!r} or null)" if refused.harmless else ""
            message = f"parameter {param!r} is not supported{default}: {refused.why}"
            raise ApiError(400, message, param=param, code="unsupported_parameter")
    return kept


def refused_names(known: Collection[str], unsupported: Mapping[str, Refused]) -> dict[str, Any]:
    """Of a body's names, those that are refused, and why."""
    return {name: refused.why for name, refused in unsupported.items() if name not in known}


def _asks_for_nothing(value: Any, refused: Refused) -> bool:
    return any(value == harmless and type(value) is type(harmless) for harmless in refused.harmless)


def _unknown(name: str, names: list[str], where: str) -> ApiError:
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return ApiError(400, f"unknown parameter {where + name!r}{hint}", param=where + name, code="unknown_parameter")
