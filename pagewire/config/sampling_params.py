"""Sampling parameters: the one table from which every service takes types, defaults, ranges and help texts.

`SamplingParams` of common.proto carries the parameters from the client to the executor. For each parameter with one
value, a row of the table yields the fields of the gateway's request bodies, those of `pagewire.SamplingParams` and of
the Python client's options (`make options` writes those), the checks, the defaults and the executor's columns. Lists
(logit_bias, stop_token_ids, bad_words) are handled by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pagewire.config.fields import Range

if TYPE_CHECKING:
    from pagewire.v1.common_pb2 import SamplingParams

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_BAD_WORDS = 1024
MAX_CACHE_SALT = 128  # characters, as in vLLM
MAX_CHOICES = 128  # outputs of one prompt that one request may ask for
# With a smaller temperature, the divided logits overflow or lose their differences to rounding: it means greedy.
MIN_TEMPERATURE = 1e-5

LOGIT_BIAS = Range(minimum=-100, maximum=100)  # of every entry of logit_bias_values
LENGTH_PENALTY = Range(minimum=-10, maximum=10)  # of beam search

# (value, size of the vocabulary) -> the number that kernels read
ToColumn = Callable[[float, int], float]
ANY = Range()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A sampling parameter with one value."""

    name: str  # of the field of SamplingParams
    type: type[int] | type[float] | type[bool]
    default: float | None  # None: an unset value stays unset
    help: str  # for clients: in /openapi.json and docs/api.md
    valid: Range = ANY
    allowed: str = ""  # `valid` in words that follow "it must be"
    column: ToColumn | None = None  # if kernels read it: the executor keeps a column of this name, int64 or fp32
    service: Literal["scheduler", "executor"] = "executor"  # applies it
    is_eager: bool = False  # steps with it sample outside of CUDA graphs


def _unchanged(value: float, vocab_size: int) -> float:
    return value


def _num_kept(top_k: float, vocab_size: int) -> float:
    """Returns how many of the most probable tokens top_k keeps: all of them where it is off."""
    return top_k if 0 < top_k < vocab_size else vocab_size


_INT32 = Range(minimum=-INT32_MAX - 1, maximum=INT32_MAX)
_INT64 = Range(minimum=-INT64_MAX - 1, maximum=INT64_MAX)
_COUNT = Range(minimum=0, maximum=INT32_MAX)
_ABOVE_ZERO, _FLOAT32_MAX = 2.0**-150, 2.0**128 - 2.0**104  # what float32, which the services get, does not round off
_SHARE = Range(minimum=0, maximum=1)
_PENALTY = Range(minimum=-2, maximum=2)

# fmt: off
PARAMETERS = (
    Parameter("temperature", float, 1.0, "Divides the logits; 0 always takes the most probable token.",
              Range(minimum=0, maximum=_FLOAT32_MAX), ">= 0 and finite", _unchanged),
    Parameter("top_p", float, 1.0, "Samples from the fewest tokens with probabilities that add up to this value.",
              Range(above=_ABOVE_ZERO, maximum=1), "in (0, 1]", _unchanged),
    Parameter("top_k", int, 0, "Samples from this many of the most probable tokens; 0 or -1: from all.",
              Range(minimum=-1, maximum=INT32_MAX), ">= 1, or 0 or -1 for off", _num_kept),
    Parameter("min_p", float, 0.0, "Drops tokens less probable than this share of the most probable token.",
              _SHARE, "in [0, 1]", _unchanged),
    Parameter("repetition_penalty", float, 1.0,
              "Divides positive logits of tokens in the prompt or the output, and multiplies negative ones.",
              Range(above=_ABOVE_ZERO, maximum=_FLOAT32_MAX), "> 0 and finite", _unchanged, is_eager=True),
    Parameter("presence_penalty", float, 0.0, "Subtracted once from the logit of each token in the output.",
              _PENALTY, "in [-2, 2]", _unchanged, is_eager=True),
    Parameter("frequency_penalty", float, 0.0,
              "Subtracted from the logit of each token in the output, once for each time it occurs.",
              _PENALTY, "in [-2, 2]", _unchanged, is_eager=True),
    Parameter("seed", int, None,
              "The same seed draws the same random numbers, regardless of other requests. These can change how logits"
              " are rounded, and so the output, unless the server has `--batch-invariant`. Unset: random, or by"
              " `--seed`.",
              _INT64, "of 64 bits", _unchanged),
    Parameter("max_tokens", int, None,
              "Most tokens of the output. Unset: as many as the model's length allows, in completions 16. More than the"
              " prompt leaves room for is refused.",
              Range(minimum=1, maximum=INT32_MAX), ">= 1", service="scheduler"),
    Parameter("min_tokens", int, 0, "Until the output has this many tokens, end tokens are not sampled and stop"
              " strings do not count.", _COUNT, "in [0, max_tokens]", is_eager=True),
    Parameter("ignore_eos", bool, False, "Continues after the model's end tokens.", service="scheduler"),
    Parameter("logprobs", int, None,
              "Returns log probabilities of the output's tokens and of this many alternatives to each.",
              _COUNT, ">= 0", is_eager=True),
    Parameter("prompt_logprobs", int, None,
              "Returns log probabilities of the prompt's tokens and of this many alternatives to each. The prompt does"
              " not use the prefix cache, and logits are computed for each of its tokens. Not with `stream`.",
              _COUNT, ">= 0"),
    Parameter("priority", int, 0,
              "With `--scheduling-policy priority`: lower values run first. Otherwise only 0 is accepted.",
              _INT32, "of 32 bits", service="scheduler"),
)
# fmt: on
BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}

_DEFAULTS = {parameter.name: parameter.default for parameter in PARAMETERS if parameter.default is not None}


def with_defaults(params: "SamplingParams") -> "SamplingParams":
    """Returns a copy in which every parameter with a default is set, and in which greedy is temperature 0."""
    filled = type(params)(**_DEFAULTS)  # type: ignore[arg-type]  # the fields' types are those of the table
    filled.MergeFrom(params)
    if 0 < filled.temperature < MIN_TEMPERATURE:
        filled.temperature = 0.0
    return filled


def seed_of_choice(seed: int, index: int) -> int:
    """Returns the seed of one output of a request that asks for several; it wraps around at 64 bits."""
    return (seed + index + INT64_MAX + 1) % 2**64 - INT64_MAX - 1
