"""Sampling parameters: the one table from which every service takes types, defaults and ranges.

`SamplingParams` of common.proto says what each parameter means and carries it from the client to the executor. A row
here says the rest of a parameter with one value: the gateway's request bodies, the checks, the defaults and the
executor's columns are made from it. Lists (logit_bias, stop_token_ids, bad_words) are dealt with by name.
"""

import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pagewire.config.fields import Range

if TYPE_CHECKING:
    from pagewire.v1.common_pb2 import Grammar, SamplingParams

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_GRAMMAR_BYTES = 2**20
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
# Log probabilities of a prompt's tokens and their alternatives: more would not fit into one message.
MAX_PROMPT_LOGPROBS = 1_000_000
MAX_MARK_TOKENS = 64
MAX_CACHE_SALT = 128  # characters, as many as vLLM takes
# Below, the logits divided by the temperature lose their differences to rounding, or overflow: it means greedy.
MIN_TEMPERATURE = 1e-5
# Of a request's field with them.
_PATH = "sampling_params"

# value, size of the vocabulary -> what kernels read
ToColumn = Callable[[float, int], float]


class InvalidRequest(ValueError):
    """A request that cannot be served as it is; the message names the field, its value and what is allowed.

    `violations` has all that was found: (field, description), where a field is a path in the request of token level.
    """

    def __init__(self, message: str, field: str = "", violations: Sequence[tuple[str, str]] = ()) -> None:
        """field: the one that is wrong, unless violations name them."""
        super().__init__(message)
        self.violations = tuple(violations) or (((field, message),) if field else ())


def check_all(checks: Iterable[Callable[[], object]]) -> None:
    """Makes every check, each of which may raise InvalidRequest. Raises one InvalidRequest for all of them."""
    found: list[InvalidRequest] = []
    for check in checks:
        try:
            check()
        except InvalidRequest as error:
            found.append(error)
    if found:
        violations = [violation for error in found for violation in error.violations]
        raise InvalidRequest("; ".join(dict.fromkeys(map(str, found))), violations=violations)


ANY = Range()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A sampling parameter with one value."""

    name: str  # of the field of SamplingParams
    type: type[int] | type[float] | type[bool]
    default: float | None  # None: what is unset stays unset
    valid: Range = ANY
    allowed: str = ""  # `valid` in words that follow "it must be"
    # For what kernels read of every row: the executor keeps a column of this name, int64 or fp32.
    column: ToColumn | None = None


def _as_it_is(value: float, vocab_size: int) -> float:
    return value


def _num_kept(top_k: float, vocab_size: int) -> float:
    """How many of the most probable tokens top_k keeps: all of them where it is off."""
    return top_k if 0 < top_k < vocab_size else vocab_size


_INT32 = Range(minimum=-INT32_MAX - 1, maximum=INT32_MAX)
_COUNT = Range(minimum=0, maximum=INT32_MAX)
_PENALTY = Range(minimum=-2, maximum=2)

PARAMETERS = (
    Parameter("temperature", float, 1.0, Range(minimum=0), ">= 0", _as_it_is),
    Parameter("top_p", float, 1.0, Range(above=0, maximum=1), "in (0, 1]", _as_it_is),
    Parameter("top_k", int, 0, Range(minimum=-1, maximum=INT32_MAX), ">= 1, or 0 or -1 for off", _num_kept),
    Parameter("min_p", float, 0.0, Range(minimum=0, maximum=1), "in [0, 1]", _as_it_is),
    Parameter("repetition_penalty", float, 1.0, Range(above=0), "> 0", _as_it_is),
    Parameter("presence_penalty", float, 0.0, _PENALTY, "in [-2, 2]", _as_it_is),
    Parameter("frequency_penalty", float, 0.0, _PENALTY, "in [-2, 2]", _as_it_is),
    Parameter("seed", int, None, Range(minimum=-INT64_MAX - 1, maximum=INT64_MAX), "of 64 bits", _as_it_is),
    Parameter("max_tokens", int, None, Range(minimum=1, maximum=INT32_MAX), ">= 1"),
    Parameter("min_tokens", int, 0, _COUNT, "in [0, max_tokens]"),
    Parameter("ignore_eos", bool, False),
    Parameter("logprobs", int, None, _COUNT, ">= 0"),
    Parameter("prompt_logprobs", int, None, _COUNT, ">= 0"),
    Parameter("priority", int, 0, _INT32, "of 32 bits"),
)
BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}
# Every entry of logit_bias_values.
LOGIT_BIAS = Range(minimum=-100, maximum=100)

LENGTH_PENALTY = Range(minimum=-10, maximum=10)  # of beam search
MAX_CHOICES = 128  # outputs of one prompt that one request may ask for

_DEFAULTS = {parameter.name: parameter.default for parameter in PARAMETERS if parameter.default is not None}


def with_defaults(params: "SamplingParams") -> "SamplingParams":
    """A copy in which only what has no default may be unset, and in which greedy is temperature 0."""
    filled = type(params)(**_DEFAULTS)  # type: ignore[arg-type]  # the fields' types are those of the table
    filled.MergeFrom(params)
    if 0 < filled.temperature < MIN_TEMPERATURE:
        filled.temperature = 0.0
    return filled


def seed_of_choice(seed: int, index: int) -> int:
    """Of the output of this index, where a request with this seed asks for several. Wraps around at 64 bits."""
    return (seed + index + INT64_MAX + 1) % 2**64 - INT64_MAX - 1


def resolve(params: "SamplingParams") -> "SamplingParams":
    """A copy that says everything, the seed included, checked as far as that is possible without knowing the model.

    Raises:
        InvalidRequest: naming every field that is out of range.
    """
    resolved = with_defaults(params)
    check_all(_checks(resolved))
    if not resolved.HasField("seed"):
        resolved.seed = secrets.randbits(63)
    return resolved


def _checks(params: "SamplingParams") -> Iterator[Callable[[], None]]:
    for parameter in PARAMETERS:
        if parameter.default is not None or params.HasField(parameter.name):  # type: ignore[arg-type]
            yield partial(check_value, parameter.name, getattr(params, parameter.name), parameter)
    yield partial(_check_min_tokens, params)
    yield partial(_check_logit_bias, params)
    if params.HasField("grammar"):
        yield partial(_check_grammar, params.grammar)
    if params.HasField("thinking"):
        yield partial(_check_thinking, params)
    yield partial(_check_bad_words, params)


def _check_min_tokens(params: "SamplingParams") -> None:
    if params.HasField("max_tokens") and params.min_tokens > params.max_tokens >= 1:
        message = f"min_tokens is {params.min_tokens}; it must be {BY_NAME['min_tokens'].allowed}"
        raise InvalidRequest(message, f"{_PATH}.min_tokens")


def _check_logit_bias(params: "SamplingParams") -> None:
    ids, values = params.logit_bias_ids, params.logit_bias_values
    if len(ids) != len(values):
        raise InvalidRequest(
            f"logit_bias_ids has {len(ids)} entries and logit_bias_values {len(values)}; they must be parallel",
            f"{_PATH}.logit_bias_values",
        )
    for token_id, bias in zip(ids, values, strict=True):
        _check(f"logit_bias of token {token_id}", bias, LOGIT_BIAS, "in [-100, 100]", "logit_bias_values")


def _check_bad_words(params: "SamplingParams") -> None:
    if (count := len(params.bad_words)) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words are {count} sequences of tokens (a word as text is up to two); {MAX_BAD_WORDS} are possible",
            f"{_PATH}.bad_words",
        )
    for index, word in enumerate(params.bad_words):
        if not 1 <= len(word.token_ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"bad_words[{index}] has {len(word.token_ids)} tokens; 1 to {MAX_BAD_WORD_TOKENS} are possible",
                f"{_PATH}.bad_words[{index}]",
            )


def _check_grammar(grammar: "Grammar") -> None:
    """Its form; what it says is the executor's to understand."""
    form = grammar.WhichOneof("form")
    if form is None or (form == "choice" and not grammar.choice.texts):
        raise InvalidRequest(
            "grammar is empty; set one of json_schema, regex, choice, ebnf and structural_tag", f"{_PATH}.grammar"
        )
    if (num_bytes := grammar.ByteSize()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"grammar has {num_bytes} bytes; {MAX_GRAMMAR_BYTES} are possible", f"{_PATH}.grammar")
    if form != "json_schema" and (grammar.HasField("whitespace_pattern") or grammar.disable_any_whitespace):
        raise InvalidRequest(
            f"whitespace_pattern and disable_any_whitespace are for json_schema, not for {form}", f"{_PATH}.grammar"
        )


def _check_thinking(params: "SamplingParams") -> None:
    thinking = params.thinking
    if params.allowed_token_ids:
        message = "allowed_token_ids excludes thinking and its budget; leave one of them out"
        raise InvalidRequest(message, f"{_PATH}.allowed_token_ids")
    start, end = list(thinking.start.token_ids), list(thinking.end.token_ids)
    answer, closing = list(thinking.answer.token_ids) or end, list(thinking.closing.token_ids) or end
    if not end or not (start or thinking.begun):
        raise InvalidRequest(
            f"thinking.{'start' if end else 'end'} is empty; it must be the tokens of the mark", f"{_PATH}.thinking"
        )
    for name, mark in {"start": start, "end": end, "answer": answer, "closing": closing}.items():
        if len(mark) > MAX_MARK_TOKENS:
            raise InvalidRequest(
                f"thinking.{name} has {len(mark)} tokens; at most {MAX_MARK_TOKENS} are possible",
                f"{_PATH}.thinking.{name}",
            )
    if closing[-len(answer) :] != answer:
        raise InvalidRequest(
            "thinking.closing must end with thinking.answer, or with thinking.end if that is unset",
            f"{_PATH}.thinking.closing",
        )
    if thinking.budget < 0:
        raise InvalidRequest(f"thinking.budget is {thinking.budget}; it must be >= 0", f"{_PATH}.thinking.budget")


def check_value(name: str, value: float, parameter: Parameter) -> None:
    """Raises InvalidRequest, which calls the parameter `name`."""
    _check(name, value, parameter.valid, parameter.allowed, parameter.name)


def _check(name: str, value: float, valid: Range, allowed: str, field: str) -> None:
    # A NaN is in every range without bounds, an infinity in some with one.
    if value not in valid or not math.isfinite(value):
        raise InvalidRequest(f"{name} is {value:g}; it must be {allowed}", f"{_PATH}.{field}")


def check_for_model(params: "SamplingParams", vocab_size: int, max_logprobs: int) -> None:
    """Checks what depends on the model.

    Raises:
        InvalidRequest: naming the first field that is out of range.
    """
    check_all(_checks_for_model(params, vocab_size, max_logprobs))


def _checks_for_model(params: "SamplingParams", vocab_size: int, max_logprobs: int) -> Iterator[Callable[[], None]]:
    for name in ("logprobs", "prompt_logprobs"):
        yield partial(_check_num_logprobs, name, getattr(params, name), max_logprobs)
    lists = {name: getattr(params, name) for name in ("logit_bias_ids", "stop_token_ids", "allowed_token_ids")}
    if params.HasField("thinking"):
        for name in ("start", "end", "answer", "closing"):
            lists[f"thinking.{name}"] = getattr(params.thinking, name).token_ids
    for index, word in enumerate(params.bad_words):
        lists[f"bad_words[{index}]"] = word.token_ids
    for name, token_ids in lists.items():
        yield partial(check_token_ids, name, token_ids, vocab_size, f"{_PATH}.{name}")


def _check_num_logprobs(name: str, wanted: int, max_logprobs: int) -> None:
    if wanted > max_logprobs:
        raise InvalidRequest(f"{name} is {wanted}, but this model gives at most {max_logprobs}", f"{_PATH}.{name}")


def check_num_prompt_logprobs(params: "SamplingParams", num_prompt_tokens: int) -> None:
    """Of params with prompt_logprobs. Raises InvalidRequest if the answer is too large a message."""
    if (count := num_prompt_tokens * (1 + params.prompt_logprobs)) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs is {params.prompt_logprobs}; {num_prompt_tokens} tokens of the prompt make that {count} "
            f"log probabilities; {MAX_PROMPT_LOGPROBS} are possible: ask for fewer alternatives, or shorten the prompt",
            f"{_PATH}.prompt_logprobs",
        )


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int, field: str = "") -> None:
    """Raises InvalidRequest, naming the first offender, unless every id is in [0, vocab_size)."""
    if min(token_ids, default=0) < 0 or max(token_ids, default=0) >= vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(f"{name} contains {wrong}; the vocabulary is 0 to {vocab_size - 1}", field or name)
