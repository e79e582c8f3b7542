"""`pagewire.SamplingParams` and `pagewire.BeamSearchParams`: the choice of the outputs of a prompt."""

import copy
import json as json_text
import numbers
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from typing import Any, Self

from pagewire.config.sampling_checks import check_value
from pagewire.config.sampling_params import BY_NAME
from pagewire.v1.common_pb2 import Grammar
from pagewire.wire.generate_request import GenerateOptions
from pagewire.wire.sampling_options import ParameterFields

_ANY_OBJECT = '{"type": "object"}'
_BEAMS = "call LLM.beam_search(prompts, BeamSearchParams(beam_width=..., max_tokens=...)) instead"
_GUIDED = "give structured_outputs=StructuredOutputsParams(...) instead, with the same fields"
_LISTED = "log probabilities of chosen tokens are not returned; logprobs=N returns those of the N most probable ones"
_PROCESSORS = (
    "functions of the program do not run in the executor; logit_bias, bad_words, allowed_token_ids and"
    " structured_outputs change which tokens are sampled"
)


class RequestOutputKind(Enum):
    """The kinds of outputs of vLLM. `LLM` returns each output once it has ended, whichever is given."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class StructuredOutputsParams:
    """The form of an output, by one of: json (a schema), regex, choice, grammar, json_object, structural_tag."""

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError unless there is exactly one form."""
        names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in names if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                f"structured outputs have {' and '.join(given) or 'no form'}; give one of {', '.join(names)}"
            )

    def as_grammar(self) -> Grammar:
        """Returns it in the form that the client takes."""
        schema = _ANY_OBJECT if self.json_object else _json(self.json)
        return Grammar(
            json_schema=schema,
            regex=self.regex,
            choice=Grammar.Choice(texts=self.choice) if self.choice else None,
            ebnf=self.grammar,
            structural_tag=_json(self.structural_tag),
            whitespace_pattern=self.whitespace_pattern,
            disable_any_whitespace=self.disable_any_whitespace,
            disable_additional_properties=self.disable_additional_properties or None,
        )


def _refused(why: str) -> dict[str, str]:
    """Declares a field of vLLM that is refused unless it has its default. why: the reason and the remedy."""
    return {"why": why}


# Declares a field of vLLM that changes nothing here.
_UNUSED = {"unused": True}


@dataclass(kw_only=True)
class SamplingParams(ParameterFields):
    """Sampling parameters with vLLM's names and meanings; docs/usage.md describes them.

    None means the default of the model (`LLM.get_default_sampling_params()`), else OpenAI's. max_tokens: 16 as in vLLM;
    None: as many as fit. structured_outputs: the form of the output; grammar: the same as a
    `pagewire.v1.common_pb2.Grammar`. detokenize: False leaves the text of the output empty.

    Raises ValueError for a value out of range, and for a field of vLLM that is not served, with the remedy.
    """

    n: int = 1
    best_of: int | None = None
    logit_bias: Mapping[int, float] | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    thinking_token_budget: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    grammar: Grammar | None = None
    detokenize: bool = True
    skip_reading_prefix_cache: bool | None = None
    # Whatever they are, the output is the same: it is returned once, and its text is that of all tokens together.
    spaces_between_special_tokens: bool = field(default=True, repr=False, metadata=_UNUSED)
    output_kind: RequestOutputKind | None = field(default=RequestOutputKind.CUMULATIVE, repr=False, metadata=_UNUSED)
    stream_interval: int | None = field(default=None, repr=False, metadata=_UNUSED)
    skip_clone: bool = field(default=False, repr=False, metadata=_UNUSED)
    flat_logprobs: bool = field(
        default=False, repr=False, metadata=_refused("log probabilities are lists of dicts; leave it out")
    )
    prompt_logprob_token_ids: Sequence[int] | None = field(
        default=None, repr=False, metadata=_refused(_LISTED.replace("logprobs=", "prompt_logprobs="))
    )
    prompt_logprob_start: int | None = field(
        default=None,
        repr=False,
        metadata=_refused("prompt_logprobs begin with the prompt; cut the list that is returned"),
    )
    logprob_token_ids: Sequence[int] | None = field(default=None, repr=False, metadata=_refused(_LISTED))
    extra_args: Mapping[str, Any] | None = field(
        default=None, repr=False, metadata=_refused("there is no sampler but the built-in one; leave it out")
    )
    logits_processors: Sequence[Any] | None = field(default=None, repr=False, metadata=_refused(_PROCESSORS))
    repetition_detection: Any = field(
        default=None,
        repr=False,
        metadata=_refused(
            "outputs are not searched for repetitions; repetition_penalty or frequency_penalty prevents them"
        ),
    )
    routed_experts_prompt_start: int = field(
        default=0, repr=False, metadata=_refused("chosen experts are not returned; leave it out")
    )
    trace_decode_token_ids: Sequence[int] | None = field(
        default=None,
        repr=False,
        metadata=_refused("outputs are sampled; to score tokens, append them to the prompt and set prompt_logprobs"),
    )
    guided_decoding: Any = field(default=None, repr=False, metadata=_refused(_GUIDED))
    use_beam_search: bool = field(default=False, repr=False, metadata=_refused(_BEAMS))
    length_penalty: float = field(default=1.0, repr=False, metadata=_refused(_BEAMS))
    early_stopping: bool | str = field(default=False, repr=False, metadata=_refused(_BEAMS))
    output_text_buffer_length: int = field(
        default=0, repr=False, metadata=_refused("vLLM sets it itself; leave it out")
    )

    def __post_init__(self) -> None:
        """Raises ValueError, and brings values to one form."""
        for one in fields(self):
            _check_served(one, getattr(self, one.name))
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or ()))
        self.bad_words = list(dict.fromkeys(self.bad_words or ()))
        self.logit_bias = {int(token): bias for token, bias in (self.logit_bias or {}).items()} or None
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        self.seed = None if self.seed == -1 else self.seed
        self.thinking_token_budget = None if self.thinking_token_budget == -1 else self.thinking_token_budget
        self._check()

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Returns the parameters; None means that one is not given."""
        return cls(**{name: value for name, value in given.items() if value is not None or name == "max_tokens"})

    def clone(self) -> Self:
        """Returns a copy that shares nothing with this."""
        return copy.deepcopy(self)

    def options(self) -> GenerateOptions:
        """Returns the parameters in the form that the client takes. Raises ValueError for a value that was set since
        and is wrong."""
        self.__post_init__()
        given = {one.name: getattr(self, one.name) for one in fields(self) if not one.metadata}
        for name in ("detokenize", "skip_reading_prefix_cache", "structured_outputs"):
            del given[name]
        if self.structured_outputs is not None:
            given["grammar"] = self.structured_outputs.as_grammar()
        if self.skip_reading_prefix_cache:
            given["cache_salt"] = uuid.uuid4().hex  # which no other request has
        given["allowed_token_ids"] = list(self.allowed_token_ids or ())
        given["clamp_max_tokens"] = True  # as in vLLM's LLM; the output's finish_reason is then "length"
        return GenerateOptions(**{name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]

    def _check(self) -> None:
        for name, parameter in BY_NAME.items():
            value = getattr(self, name)
            if value is None or parameter.type is bool:
                continue
            if not isinstance(value, numbers.Real if parameter.type is float else numbers.Integral):
                kind = "a number" if parameter.type is float else "an integer"
                raise ValueError(f"{name} is {value!r:.100}; it must be {kind}, {parameter.allowed}")
            check_value(name, parameter.type(value), parameter)  # type: ignore[arg-type, call-overload]
        if "" in self.stop or "" in self.bad_words:  # type: ignore[operator]  # lists by now
            raise ValueError(f"{'stop' if '' in self.stop else 'bad_words'} has an empty text; leave it out")  # type: ignore[operator]
        if self.stop and not self.detokenize:
            raise ValueError("stop is found in the text, which detokenize=False leaves out; give one of them")
        if self.structured_outputs is not None and self.grammar is not None:
            raise ValueError("structured_outputs and grammar are the same; give one of them")


@dataclass
class BeamSearchParams:
    """Parameters of `LLM.beam_search`, with vLLM's names.

    length_penalty: an output's score is the log probability of its tokens together divided by their number to this
    power. temperature: of no effect, as in vLLM; the search ranks by the model's own probabilities.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.structured_outputs is not None:
            raise ValueError("structured_outputs: beams are not restricted to a form; call LLM.generate for that")


def _check_served(one: "Field[Any]", value: Any) -> None:
    why = one.metadata.get("why")
    if why is not None and value is not None and value != one.default and value not in ([], {}, ()):
        raise ValueError(f"{one.name} is not supported: {why}")


def _json(value: str | Mapping[str, Any] | None) -> str | None:
    return value if value is None or isinstance(value, str) else json_text.dumps(value)
