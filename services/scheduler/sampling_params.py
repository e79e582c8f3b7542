"""How the next token of a request is chosen, with every default resolved."""

import math
from dataclasses import dataclass

# Below, the logits divided by the temperature lose their differences to rounding, or overflow: it means greedy.
MIN_TEMPERATURE = 1e-5


class InvalidRequest(ValueError):
    """A request that cannot be served as it is; the message names the field, its value and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Mirrors `SamplingParams` of common.proto, where the fields are described."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    priority: int = 0

    def validate(self) -> None:
        """Checks what can be checked without knowing the model.

        Raises:
            InvalidRequest: naming the first field that is out of range.
        """
        _check("temperature", self.temperature, self.temperature >= 0, ">= 0")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _check("top_k", self.top_k, self.top_k >= -1, ">= 1, or 0 or -1 for off")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        _check("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "> 0")
        _check("presence_penalty", self.presence_penalty, -2 <= self.presence_penalty <= 2, "in [-2, 2]")
        _check("frequency_penalty", self.frequency_penalty, -2 <= self.frequency_penalty <= 2, "in [-2, 2]")
        for token_id, bias in self.logit_bias:
            _check(f"logit_bias of token {token_id}", bias, -100 <= bias <= 100, "in [-100, 100]")
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, self.max_tokens >= 1, ">= 1")
        limit = math.inf if self.max_tokens is None else self.max_tokens
        _check("min_tokens", self.min_tokens, 0 <= self.min_tokens <= limit, "in [0, max_tokens]")
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, self.logprobs >= 0, ">= 0")

    def validate_for(self, vocab_size: int, max_logprobs: int) -> None:
        """Checks what depends on the model.

        Raises:
            InvalidRequest: naming the first field that is out of range.
        """
        if self.logprobs is not None and self.logprobs > max_logprobs:
            raise InvalidRequest(f"logprobs is {self.logprobs}, but this model gives at most {max_logprobs}")
        for token_id, _ in self.logit_bias:
            _check_token("logit_bias_ids", token_id, vocab_size)
        for token_id in self.stop_token_ids:
            _check_token("stop_token_ids", token_id, vocab_size)


def check_token_ids(name: str, token_ids: list[int], vocab_size: int) -> None:
    """Raises InvalidRequest, naming the first offender, unless every id is in [0, vocab_size)."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        for token_id in token_ids:
            _check_token(name, token_id, vocab_size)


def _check_token(name: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(f"{name} contains {token_id}; the vocabulary is 0 to {vocab_size - 1}")


def _check(name: str, value: float, valid: bool, allowed: str) -> None:
    # A NaN fails every comparison, infinities are caught here.
    if not valid or not math.isfinite(value):
        raise InvalidRequest(f"{name} is {value:g}; it must be {allowed}")
