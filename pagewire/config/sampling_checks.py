"""Checks of sampling parameters: what holds for every model, and what depends on the model.

Every description of a violation begins with the name of its field, the path without "sampling_params.": a service with
another name for the field replaces the beginning.
"""

import math
import secrets
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING

from pagewire.config.fields import Range
from pagewire.config.sampling_params import BY_NAME, LOGIT_BIAS, MAX_BAD_WORDS, PARAMETERS, Parameter, with_defaults
from pagewire.errors import InvalidRequest, check_all

if TYPE_CHECKING:
    from pagewire.v1.common_pb2 import Grammar, SamplingParams

MAX_GRAMMAR_BYTES = 2**20
MAX_BAD_WORD_TOKENS = 64
# Token ids and texts in the parameters of all choices of a request: each choice has its own.
MAX_VALUES = 1_000_000
# Log probabilities of a prompt's tokens and of the alternatives: more would not fit into one message.
MAX_PROMPT_LOGPROBS = 1_000_000
MAX_MARK_TOKENS = 64
# The field of a request that holds the parameters.
_PATH = "sampling_params"


def resolve(params: "SamplingParams") -> "SamplingParams":
    """Returns a copy in which everything is set, the seed included, after all checks that do not depend on the model.

    Raises:
        InvalidRequest: naming every field that is out of range.
    """
    resolved = with_defaults(params)
    check_all(_checks(resolved))
    if not resolved.HasField("seed"):
        resolved.seed = secrets.randbits(63)
    return resolved


def num_values(params: "SamplingParams") -> int:
    """Returns how many token ids and texts the parameters of one choice have."""
    num_ids = len(params.logit_bias_ids) + len(params.stop_token_ids) + len(params.allowed_token_ids)
    return num_ids + len(params.grammar.choice.texts)


def check_num_values(params: "SamplingParams", num_choices: int) -> None:
    """Raises InvalidRequest if the parameters have too many token ids and texts for so many choices."""
    if (count := num_choices * num_values(params)) > MAX_VALUES:
        raise InvalidRequest(
            f"stop_token_ids, allowed_token_ids, logit_bias_ids and grammar.choice have {count} values in all"
            f" {num_choices} choices; at most {MAX_VALUES} are possible: ask for fewer choices, or give fewer values",
            f"{_PATH}.stop_token_ids",
        )


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
            f"logit_bias_values has {len(values)} entries, but logit_bias_ids has {len(ids)}; they must be parallel",
            f"{_PATH}.logit_bias_values",
        )
    for token_id, bias in zip(ids, values, strict=True):
        _check(f"logit_bias_values of token {token_id}", bias, LOGIT_BIAS, "in [-100, 100]", "logit_bias_values")


def _check_bad_words(params: "SamplingParams") -> None:
    most = 2 * MAX_BAD_WORDS  # a word of text becomes up to two
    if (count := len(params.bad_words)) > most:
        raise InvalidRequest(
            f"bad_words has {count} sequences of tokens (a word of text becomes up to two), more than {most}",
            f"{_PATH}.bad_words",
        )
    for index, word in enumerate(params.bad_words):
        if not 1 <= len(word.token_ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"bad_words[{index}] has {len(word.token_ids)} tokens; 1 to {MAX_BAD_WORD_TOKENS} are possible",
                f"{_PATH}.bad_words[{index}]",
            )


def _check_grammar(grammar: "Grammar") -> None:
    """Checks the form alone; the executor compiles the content."""
    form = grammar.WhichOneof("form")
    if form is None or (form == "choice" and not grammar.choice.texts):
        raise InvalidRequest(
            "grammar is empty; set one of json_schema, regex, choice, ebnf and structural_tag", f"{_PATH}.grammar"
        )
    if (num_bytes := grammar.ByteSize()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"grammar has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are possible", f"{_PATH}.grammar"
        )
    if form != "json_schema" and (grammar.HasField("whitespace_pattern") or grammar.disable_any_whitespace):
        raise InvalidRequest(
            f"grammar has whitespace_pattern or disable_any_whitespace, which are for json_schema, not for {form}",
            f"{_PATH}.grammar",
        )


def _check_thinking(params: "SamplingParams") -> None:
    thinking = params.thinking
    if params.allowed_token_ids:
        message = "allowed_token_ids cannot be combined with thinking and its budget; leave one of them out"
        raise InvalidRequest(message, f"{_PATH}.allowed_token_ids")
    start, end = list(thinking.start.token_ids), list(thinking.end.token_ids)
    answer, closing = list(thinking.answer.token_ids) or end, list(thinking.closing.token_ids) or end
    if not end or not (start or thinking.begun):
        raise InvalidRequest(
            f"thinking.{'start' if end else 'end'} is empty; it must hold the tokens of the mark",
            f"{_PATH}.thinking.{'start' if end else 'end'}",
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
    """Raises InvalidRequest for a value out of range; the message calls the parameter `name`."""
    _check(name, value, parameter.valid, parameter.allowed, parameter.name)


def _check(name: str, value: float, valid: Range, allowed: str, field: str) -> None:
    # A NaN is in every range without bounds, an infinity in some ranges with one bound.
    if value not in valid or not math.isfinite(value):
        raise InvalidRequest(f"{name} is {value:g}; it must be {allowed}", f"{_PATH}.{field}")


def check_for_model(
    params: "SamplingParams", vocab_size: int, max_logprobs: int, eos_token_ids: Collection[int] = ()
) -> None:
    """Checks what depends on the model.

    Raises:
        InvalidRequest: naming every field that is out of range.
    """
    check_all(_checks_for_model(params, vocab_size, max_logprobs))
    _check_that_tokens_are_left(params, vocab_size, eos_token_ids)


def _check_that_tokens_are_left(params: "SamplingParams", vocab_size: int, eos_token_ids: Collection[int]) -> None:
    """Checks that some token may be sampled at all; where only a grammar forbids them, its matcher reports that."""
    allowed = set(params.allowed_token_ids) or range(vocab_size)
    if params.min_tokens > 0 and not params.HasField("grammar"):
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        if ends.issuperset(allowed):
            raise InvalidRequest(
                f"min_tokens is {params.min_tokens}, but all allowed tokens are end tokens or stop_token_ids, which the"
                " output may not have before; allow another token, or leave min_tokens out",
                f"{_PATH}.min_tokens",
            )
    if {word.token_ids[0] for word in params.bad_words if len(word.token_ids) == 1}.issuperset(allowed):
        raise InvalidRequest(
            "bad_words has all tokens that are allowed; allow another token, or leave words out", f"{_PATH}.bad_words"
        )


def _checks_for_model(params: "SamplingParams", vocab_size: int, max_logprobs: int) -> Iterator[Callable[[], None]]:
    for name in ("logprobs", "prompt_logprobs"):
        yield partial(_check_num_logprobs, name, getattr(params, name), max_logprobs)
    lists = {name: getattr(params, name) for name in ("logit_bias_ids", "stop_token_ids", "allowed_token_ids")}
    if params.HasField("thinking"):
        for name in ("start", "end", "answer", "closing"):
            lists[f"thinking.{name}"] = getattr(params.thinking, name).token_ids
    for name, token_ids in lists.items():
        yield partial(_check_num_ids, name, len(token_ids), vocab_size)
    for index, word in enumerate(params.bad_words):
        lists[f"bad_words[{index}]"] = word.token_ids
    for name, token_ids in lists.items():
        yield partial(check_token_ids, name, token_ids, vocab_size, f"{_PATH}.{name}")


def _check_num_ids(name: str, count: int, vocab_size: int) -> None:
    if count > vocab_size:
        raise InvalidRequest(f"{name} has {count} ids, and the vocabulary only {vocab_size}", f"{_PATH}.{name}")


def _check_num_logprobs(name: str, wanted: int, max_logprobs: int) -> None:
    if wanted > max_logprobs:
        raise InvalidRequest(f"{name} is {wanted}, but this model returns at most {max_logprobs}", f"{_PATH}.{name}")


def check_num_prompt_logprobs(params: "SamplingParams", num_prompt_tokens: int) -> None:
    """Raises InvalidRequest if the log probabilities of the prompt do not fit into one message. params has
    prompt_logprobs."""
    if (count := num_prompt_tokens * (1 + params.prompt_logprobs)) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs is {params.prompt_logprobs}; with {num_prompt_tokens} tokens of the prompt, that makes"
            f" {count} log probabilities, and at most {MAX_PROMPT_LOGPROBS} are possible: ask for fewer alternatives,"
            " or shorten the prompt",
            f"{_PATH}.prompt_logprobs",
        )


def check_room(params: "SamplingParams", num_prompt_tokens: int, max_num_tokens: int, *, clamps: bool) -> None:
    """Checks that the output fits into the context behind the prompt.

    Args:
        max_num_tokens: of prompt and output.
        clamps: max_tokens is lowered instead; min_tokens never is.

    Raises:
        InvalidRequest: it does not. Clients look for the words of vLLM that it begins with.
    """
    for name in ("min_tokens",) if clamps else ("max_tokens", "min_tokens"):
        wanted = getattr(params, name)
        if wanted > (room := max_num_tokens - num_prompt_tokens):
            raise InvalidRequest(
                f"{name} is too large: {wanted}. This model's maximum context length is {max_num_tokens} tokens, and"
                f" the prompt has {num_prompt_tokens}, which leaves {room}: ask for less, or shorten the prompt",
                f"{_PATH}.{name}",
            )


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int, field: str = "") -> None:
    """Raises InvalidRequest, naming the first wrong id, unless every id is in [0, vocab_size)."""
    if min(token_ids, default=0) < 0 or max(token_ids, default=0) >= vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(f"{name} contains {wrong}; the vocabulary is 0 to {vocab_size - 1}", field or name)
