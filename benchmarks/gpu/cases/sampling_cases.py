"""Sampling, log probabilities and penalties at 256 requests and a vocabulary of 152 k."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases.case import OURS, Built, Case, Contestant, Target
from benchmarks.gpu.measure import Call, num_sets, relative_error
from pagewire.kernels import ops, reference
from pagewire.kernels.sampling_parameters import FloatParameter

# 3.3 and 2 times the time of reading the logits once
TARGETS = (Target("fraction", 1 / 3.3, 1 / 2.0),)
PROMPT_LEN, OUTPUT_LEN = 768, 256
# Rounding decides differently here and there where two tokens are as good as equal.
MAX_DIFFERENT = 0.02


@dataclass(frozen=True)
class Sampling:
    name: str
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def value(self, parameter: FloatParameter) -> float:
        """Returns its value of a parameter, or the one that turns the parameter off."""
        off = 1.0 if parameter is FloatParameter.REPETITION_PENALTY else 0.0
        value: float = getattr(self, parameter.name.lower(), off)
        return value


SAMPLINGS = (
    Sampling("greedy", temperature=0.0),
    Sampling("temperature"),
    Sampling("top-p 0.9", top_p=0.9),
    Sampling("top-k 50", top_k=50),
    Sampling("top-k 20 top-p 0.8", top_k=20, top_p=0.8),
)


@dataclass(frozen=True)
class Size:
    num_reqs: int
    vocab_size: int

    def __str__(self) -> str:
        return f"{self.num_reqs} x {self.vocab_size}"


def cases(device: torch.device, small: bool) -> Iterator[Case]:
    size = Size(3, 500) if small else Size(256, 151_936)
    for kind, logits in LOGITS.items():
        for sampling in SAMPLINGS:
            yield _sample(size, sampling, kind, logits, torch.float32, device)
    yield _sample(size, SAMPLINGS[-1], "random", LOGITS["random"], torch.bfloat16, device)
    for num_top in (0, 5, 20):
        yield _logprobs(size, num_top, device)
    yield _penalties(size, device)


def _random(size: Size, device: torch.device) -> Tensor:
    return torch.randn(size.num_reqs, size.vocab_size, device=device)


def _peaked(size: Size, device: torch.device) -> Tensor:
    """As language models give them: probabilities that fall with their rank, most of the mass on few tokens."""
    ranks = torch.rand(size.num_reqs, size.vocab_size, device=device).argsort(-1).float()
    return -2.0 * torch.log1p(ranks) + torch.randn(size.num_reqs, size.vocab_size, device=device) * 0.5


LOGITS: dict[str, Callable[[Size, torch.device], Tensor]] = {"random": _random, "peaked": _peaked}


class Rows:
    """The state that sampling reads and writes: a prompt and some output per row."""

    def __init__(self, size: Size, sampling: Sampling, device: torch.device) -> None:
        count = size.num_reqs

        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        self.rows = torch.randperm(count).int().to(device)
        self.floats = torch.stack([column(sampling.value(parameter), torch.float32) for parameter in FloatParameter])
        self.top_k = column(sampling.top_k or size.vocab_size, torch.int64)
        self.seeds = torch.randint(-(2**62), 2**62, (count,), device=device)
        self.token_ids = torch.randint(0, size.vocab_size, (count, 8192), device=device).int()
        self.num_tokens = column(PROMPT_LEN + OUTPUT_LEN, torch.int64)
        self.num_prompt_tokens = column(PROMPT_LEN, torch.int64)

    def reset(self) -> None:
        self.num_tokens.fill_(PROMPT_LEN + OUTPUT_LEN)

    def arguments(self) -> tuple[Any, ...]:
        """Returns the arguments of `sample_tokens` after the logits."""
        return self.rows, self.floats, self.top_k, self.seeds, self.token_ids, self.num_tokens, None


def _sample(
    size: Size,
    sampling: Sampling,
    kind: str,
    make_logits: Callable[[Size, torch.device], Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    num_bytes = size.num_reqs * size.vocab_size * dtype.itemsize

    def build() -> Built:
        rows = Rows(size, sampling, device)
        sets = [make_logits(size, device).to(dtype) for _ in range(num_sets(num_bytes, device))]

        def error() -> float:
            results = []
            for sample_tokens in (ops.sample_tokens, reference.sample_tokens):
                rows.reset()
                results.append(sample_tokens(sets[0], *rows.arguments()))
                written = rows.token_ids[rows.rows.long(), PROMPT_LEN + OUTPUT_LEN]
                if not torch.equal(written.long(), results[-1]):
                    return float("nan")
            rows.reset()
            ours, expected = results
            return float((ours != expected).double().mean())

        calls: list[Call] = [partial(ops.sample_tokens, logits, *rows.arguments()) for logits in sets]
        built = Built({OURS: Contestant(calls, error, MAX_DIFFERENT)}, rows.reset)
        if sampling.temperature == 0.0:
            argmax: list[Call] = [partial(torch.argmax, logits, -1) for logits in sets]
            built.contestants["torch argmax"] = Contestant(argmax, None)
        return built

    name = f"{sampling.name} {kind}" + (" bf16" if dtype == torch.bfloat16 else "")
    return Case("sampling", name, num_bytes, build, 0, TARGETS)


def _logprobs(size: Size, num_top: int, device: torch.device) -> Case:
    num_bytes = size.num_reqs * size.vocab_size * 4

    def build() -> Built:
        sets = [_peaked(size, device) for _ in range(num_sets(num_bytes, device))]
        chosen = torch.randint(0, size.vocab_size, (size.num_reqs,), device=device)

        def error() -> float:
            ids, logprobs, ranks = ops.token_logprobs(sets[0], chosen, num_top)
            expected_ids, expected, expected_ranks = reference.token_logprobs(sets[0], chosen, num_top)
            if not torch.equal(ids, expected_ids) or not torch.equal(ranks, expected_ranks):
                return float("nan")
            return relative_error(logprobs, expected)

        calls: list[Call] = [partial(ops.token_logprobs, logits, chosen, num_top) for logits in sets]
        return Built({OURS: Contestant(calls, error, 1e-4)})

    return Case("sampling", f"token_logprobs top {num_top}", num_bytes, build)


def _penalties(size: Size, device: torch.device) -> Case:
    """Bytes: the tokens, and the logits of at most as many different ones, read and written."""
    known = PROMPT_LEN + OUTPUT_LEN
    num_bytes = size.num_reqs * known * (4 + 2 * 4)

    def build() -> Built:
        rows = Rows(size, SAMPLINGS[0], device)
        sets = [_peaked(size, device) for _ in range(num_sets(size.num_reqs * size.vocab_size * 4, device))]
        indices = torch.arange(size.num_reqs, dtype=torch.int32, device=device)
        rows.floats[-3:] = torch.tensor([[1.1], [0.2], [0.1]], device=device)  # the penalties
        arguments: tuple[Any, ...] = (
            indices,
            rows.rows,
            rows.floats,
            rows.token_ids,
            rows.num_tokens,
            rows.num_prompt_tokens,
            None,
        )

        def error() -> float:
            ours, expected = sets[0].clone(), sets[0].clone()
            ops.apply_penalties(ours, *arguments)
            reference.apply_penalties(expected, *arguments)
            return relative_error(ours - sets[0], expected - sets[0])

        calls: list[Call] = [partial(ops.apply_penalties, logits, *arguments) for logits in sets]
        return Built({OURS: Contestant(calls, error, 1e-4)})

    return Case("sampling", f"apply_penalties {known} tokens", num_bytes, build)
