"""Prompts and options in vLLM's forms, as the client takes them."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
# Options of vLLM's tokenizers -> those of the client.
_TOKENIZATION = {"add_special_tokens": "add_special_tokens", "truncate_prompt_tokens": "truncate_prompt_tokens"}


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for a request, with vLLM's names. lora_path: of its files; "": it is loaded already."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


@dataclass(kw_only=True)
class PoolingParams:
    """Parameters of vectors, with vLLM's names. dimensions: the number of first values that are kept.

    Raises ValueError for a parameter of vLLM that is not served.
    """

    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for name in ("use_activation", "normalize"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is not supported: the model's files decide it (modules.json); leave it out")

    def options(self) -> dict[str, Any]:
        """Returns the parameters in the form that the client takes."""
        given = {"dimensions": self.dimensions, "truncate_prompt_tokens": self.truncate_prompt_tokens}
        return {name: value for name, value in given.items() if value is not None}


def as_prompts(prompts: Any) -> Iterable[Any]:
    """Returns the prompts: one that is given alone, as a text, a dict or token ids, becomes a list."""
    is_ids = isinstance(prompts, Sequence) and not isinstance(prompts, str) and prompts and isinstance(prompts[0], int)
    return [prompts] if isinstance(prompts, str | Mapping) or is_ids else prompts


def prompt_of(prompt: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a prompt, text or token ids, and its own options. Raises ValueError for a form that is not served."""
    if not isinstance(prompt, Mapping):
        return prompt, {}
    if unknown := sorted(name for name, value in prompt.items() if name not in _PROMPT_KEYS and value is not None):
        of_chats = {"role": "messages are for LLM.chat", "multi_modal_data": "images go into messages of LLM.chat"}
        why = next((of_chats[name] for name in of_chats if name in unknown), "leave it out")
        raise ValueError(f"a prompt has {', '.join(unknown)}, which is not supported: {why}")
    given = [prompt[name] for name in ("prompt_token_ids", "prompt") if prompt.get(name) is not None]
    if not given:
        raise ValueError('a prompt is empty; give a text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}')
    return given[0], {"cache_salt": prompt["cache_salt"]} if prompt.get("cache_salt") else {}


def client_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of a call in the form that the client takes. Raises ValueError for what is not served."""
    options = dict(given)
    if options.pop("mm_processor_kwargs", None):
        raise ValueError("mm_processor_kwargs is not supported: images are read as the model's files say; leave it out")
    options.pop("chat_template_content_format", None)  # the template alone decides how it reads contents
    for name, value in dict(options.pop("tokenization_kwargs", None) or {}).items():
        if name == "truncation":
            continue
        if name == "max_length":
            name = "truncate_prompt_tokens"
        if name not in _TOKENIZATION:
            names = ", ".join((*_TOKENIZATION, "truncation", "max_length"))
            raise ValueError(f"tokenization_kwargs[{name!r}] is not supported; there are {names}")
        options[_TOKENIZATION[name]] = value
    return options


def each(values: Any, count: int, name: str) -> Sequence[Any] | None:
    """Returns values that are given for each of `count` prompts, or None for a single value. Raises ValueError for
    another number of values."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return None
    if len(values) != count:
        raise ValueError(f"{count} prompts and {len(values)} {name}: give one, or one for each")
    return values


def length(items: Iterable[Any]) -> int:
    """Returns the length; 0 if it is unknown."""
    return len(items) if isinstance(items, Sized) else 0
