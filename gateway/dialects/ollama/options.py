"""Ollama's `options` and `keep_alive`."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, create_model, model_validator

from pagewire.config.sampling_params import BY_NAME, INT32_MAX
from pagewire.gateway.core.reading.names import Refused, wrong_member
from pagewire.gateway.schema.field import field
from pagewire.gateway.schema.parameters import Parameters, StopString, StopStrings
from pagewire.gateway.schema.sampling import sampling_fields

MAX_PENALTY = 1e6
_FLAGS = "Ignored: flags of the server decide."
_UNITS: Mapping[str, float] = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"[+-]?(?:\d{1,18}(?:\.\d{1,18})?(?:ns|us|µs|ms|s|m|h)){1,8}|[+-]?0")
_PART = re.compile(r"([\d.]+)(ns|us|µs|ms|s|m|h)")


def idle_seconds(keep_alive: float | str | None) -> float | None:
    """Returns after how many idle seconds a model may be put away; None: not said. Below 0: never. Raises ValueError.

    A text is a duration as Go writes it: "5m", "1h30m", "-1s".
    """
    if not isinstance(keep_alive, str):
        return keep_alive
    if not _DURATION.fullmatch(keep_alive):
        shown = repr(keep_alive[:40])
        raise ValueError(f"input should be seconds, or a duration such as '5m', '1h30m' or '-1s', not {shown}")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(keep_alive))
    return -seconds if keep_alive.startswith("-") else seconds


def _checked(keep_alive: float | str | None) -> float | str | None:
    idle_seconds(keep_alive)
    return keep_alive


KeepAlive = Annotated[float | str, Field(union_mode="left_to_right"), AfterValidator(_checked)]
KEEP_ALIVE = (
    "The time for which an idle model stays loaded: seconds, or a duration such as `5m`; 0: until the answer, below 0: "
    "for ever. Only with `pagewire serve`."
)

_SAME_NAMES = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")

_SameOptions = create_model(
    "_SameOptions",
    __base__=Parameters,
    **{name: value for name, value in sampling_fields().items() if name in _SAME_NAMES},
)


class OllamaOptions(_SameOptions):  # type: ignore[misc, valid-type]  # its fields are Any to mypy
    """Sampling parameters, and the length of prompt and output."""

    unsupported: ClassVar[Mapping[str, Refused]] = {
        "embedding_only": Refused("the kind of the model decides", (False,)),
        "logits_all": Refused("see logprobs", (False,)),
        "mirostat": Refused("see temperature, top_p and min_p", (0,)),
        "penalize_newline": Refused("penalties apply to all tokens", (True,)),
        "tfs_z": Refused("see top_p and min_p", (1, 1.0)),
        "typical_p": Refused("see top_p and min_p", (1, 1.0)),
        "vocab_only": Refused("the whole model is loaded", (False,)),
    }

    num_ctx: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = field(
        "gateway", "Most tokens of the prompt, see `truncate`. More than the server takes changes nothing."
    )
    num_predict: Annotated[int, Field(ge=-2, le=INT32_MAX)] | None = field(
        "scheduler", "Most tokens of the output; 0, -1 and -2: as many as the model's length allows.", -1
    )
    stop: StopString | StopStrings | None = field(
        "tokenizer", "Strings that end the output; they are not part of it.", union_mode="left_to_right"
    )
    repeat_penalty: Annotated[float, Field(gt=0, le=MAX_PENALTY)] | None = field(
        "executor", BY_NAME["repetition_penalty"].help, 1.0
    )
    repeat_last_n: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = field(
        "gateway", "-1: penalties look at all tokens; 0 switches them off. Others only without penalties.", -1
    )
    num_keep: int | None = field("gateway", "Ignored: an output ends where the model's length does.")
    mirostat_eta: float | None = field("gateway", "Ignored: only with `mirostat`.")
    mirostat_tau: float | None = field("gateway", "Ignored: only with `mirostat`.")
    f16_kv: bool | None = field("gateway", _FLAGS)
    low_vram: bool | None = field("gateway", _FLAGS)
    main_gpu: int | None = field("gateway", _FLAGS)
    num_batch: int | None = field("gateway", _FLAGS)
    num_gpu: int | None = field("gateway", _FLAGS)
    num_thread: int | None = field("gateway", _FLAGS)
    numa: bool | None = field("gateway", _FLAGS)
    use_mlock: bool | None = field("gateway", _FLAGS)
    use_mmap: bool | None = field("gateway", _FLAGS)

    @model_validator(mode="after")
    def _penalties_look_at_all_tokens(self) -> "OllamaOptions":
        penalties = {"repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
        if (self.repeat_last_n or 0) > 0 and any(
            getattr(self, name) not in (None, off) for name, off in penalties.items()
        ):
            raise wrong_member("repeat_last_n", "penalties look at all tokens (-1) or are off (0)")
        return self

    def of_chat(self) -> dict[str, Any]:
        """Returns the parameters of chats and completions with the same meaning."""
        given: dict[str, Any] = {name: getattr(self, name) for name in _SAME_NAMES}
        given["repetition_penalty"] = self.repeat_penalty
        if self.repeat_last_n == 0:
            given |= dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"))
        given["max_tokens"] = self.num_predict if (self.num_predict or 0) > 0 else None
        given["stop"] = self.stop or None
        return {name: value for name, value in given.items() if value is not None}


# Names of chats and completions -> Ollama's.
NAMES: Mapping[str, str] = {
    **{name: f"options.{name}" for name in (*_SAME_NAMES, "stop")},
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "truncate_prompt_tokens": "options.num_ctx",
}
