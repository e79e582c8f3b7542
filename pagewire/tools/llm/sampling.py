"""`pagewire.SamplingParams`: the choice of the outputs of a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from pagewire.v1.common_pb2 import Grammar
from pagewire.wire.generate_request import GenerateOptions
from pagewire.wire.sampling_options import ParameterFields


@dataclass(frozen=True, kw_only=True)
class SamplingParams(ParameterFields):
    """Sampling parameters with vLLM's names and meanings; docs/usage.md describes them.

    None means the default of the model (`LLM.get_default_sampling_params()`), else OpenAI's. max_tokens: 16 as in vLLM;
    None: as many as fit. grammar: the form of the output, `pagewire.v1.common_pb2.Grammar(regex=...)`.
    """

    n: int = 1
    best_of: int | None = None
    logit_bias: Mapping[int, float] | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] = ()
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    grammar: Grammar | None = None

    def options(self) -> GenerateOptions:
        """Returns the parameters in the form that the client takes."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given["stop"] = [self.stop] if isinstance(self.stop, str) else list(self.stop)
        given["clamp_max_tokens"] = True  # as in vLLM's LLM; the output's finish_reason is then "length"
        return GenerateOptions(**{name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]
