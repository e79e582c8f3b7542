"""The sampling parameters with one value, as Python types.

Generated from the table in pagewire/config/sampling_params.py by `make options`; do not edit.
"""

from dataclasses import dataclass
from typing import TypedDict


class ParameterOptions(TypedDict, total=False):
    """Options of the Python client; None leaves one unset."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int | None


@dataclass(kw_only=True)
class ParameterFields:
    """Fields of `pagewire.SamplingParams`; None leaves one unset."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
