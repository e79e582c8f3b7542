"""Arguments of `sample_tokens` for tests: rows of any parameters, and what must not matter around them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.ops import NOT_A_NUMBER
from pagewire.kernels.sampling_parameters import FloatParameter

STALE = -12345
# Values of parameters with which they change nothing.
OFF = {
    **{"temperature": 1.0, "top_p": 1.0, "min_p": 0.0},
    **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}


def float_parameters(count: int, **columns: list[float] | float) -> Tensor:
    """The matrix of parameters of `count` rows, fp32 [len(FloatParameter), count]; those not given are off."""
    values = OFF | columns
    rows = [torch.as_tensor(values[parameter.name.lower()]).expand(count) for parameter in FloatParameter]
    return torch.stack([row.float() for row in rows])


@dataclass(frozen=True)
class Row:
    temperature: float = 1.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0  # num_tokens before
    offset: int = 0  # drafts behind them, if the batch has drafts
    padding: bool = False


@dataclass
class SamplingBatch:
    """One `Row` per row of logits [S, vocab_size]. Rows of state are in reverse order, with a gap after each."""

    logits: Tensor
    lines: list[Row]
    drafts: bool = False
    token_ids: Tensor = field(init=False)  # int32 [max_num_seqs, max_model_len], STALE throughout
    num_tokens: Tensor = field(init=False)  # int64 [max_num_seqs]
    rows: Tensor = field(init=False)  # int32 [S]

    def __post_init__(self) -> None:
        size = len(self.lines)
        assert len(self.logits) == size
        rows = [2 * (size - index) - 1 for index in range(size)]
        longest = max(line.position for line in self.lines) + 2
        self.token_ids = torch.full((2 * size, longest), STALE, dtype=torch.int32)
        self.num_tokens = self._column([line.position for line in self.lines], rows, torch.int64)
        self.rows = torch.tensor(
            [-1 if line.padding else row for line, row in zip(self.lines, rows, strict=True)], dtype=torch.int32
        )
        vocab_size = self.logits.shape[1]
        self._parameters = (
            self._floats(rows),
            self._column([line.top_k or vocab_size for line in self.lines], rows, torch.int64),
            self._column([line.seed for line in self.lines], rows, torch.int64),
        )

    def _floats(self, rows: list[int]) -> Tensor:
        floats = torch.zeros(len(FloatParameter), 2 * len(rows))
        names = [parameter.name.lower() for parameter in FloatParameter]
        floats[:, rows] = torch.tensor([[getattr(line, name, OFF[name]) for line in self.lines] for name in names])
        return floats

    @staticmethod
    def _column(values: list[float], rows: list[int], dtype: torch.dtype) -> Tensor:
        column = torch.zeros(2 * len(rows), dtype=dtype)
        column[rows] = torch.tensor(values, dtype=dtype)
        return column

    def copy(self) -> SamplingBatch:
        return SamplingBatch(self.logits.clone(), self.lines, self.drafts)

    def args(self) -> tuple[Any, ...]:
        offsets = torch.tensor([line.offset for line in self.lines], dtype=torch.int32) if self.drafts else None
        return (self.logits, self.rows, *self._parameters, self.token_ids, self.num_tokens, offsets)

    @property
    def live(self) -> Tensor:
        return self.rows >= 0


def assert_same(actual: SamplingBatch, sampled: Tensor, expected: SamplingBatch, wanted: Tensor) -> None:
    """The same tokens, appended alike; padded lines left nothing."""
    live = expected.live
    assert sampled.dtype == torch.int64
    assert sampled[live].tolist() == wanted[live].tolist()
    assert torch.equal(actual.token_ids, expected.token_ids)
    assert torch.equal(actual.num_tokens, expected.num_tokens)


def assert_broken(batch: SamplingBatch, sampled: Tensor) -> None:
    """Tokens of the vocabulary but where logits are NaN; in rows, nothing that the next step could not read."""
    assert torch.equal(sampled == NOT_A_NUMBER, batch.logits.isnan().any(-1))
    assert ((sampled >= NOT_A_NUMBER) & (sampled < batch.logits.shape[1])).all()
    rows = batch.rows.long()
    assert torch.equal(batch.token_ids[rows, batch.num_tokens[rows] - 1].long(), sampled.clamp(min=0))


def random_masks(num_masks: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Returns int32 [num_masks, words]: with all bits, with none, with some."""
    shape, generator = (num_masks, -(-vocab_size // 32)), torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=generator).int()
    kind = torch.randint(0, 3, shape, generator=generator)
    return torch.where(kind == 0, -1, torch.where(kind == 1, 0, words)).int()


def random_logits(num_rows: int, vocab_size: int, *, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


# Two lines each.
BROKEN_LINES = [
    [Row(temperature=0.0), Row()],
    [Row(top_k=3), Row(top_p=0.5)],
    [Row(min_p=0.5), Row(top_k=150, top_p=0.1, min_p=0.01)],
]


def broken_logits(vocab_size: int) -> list[Tensor]:
    """Logits [2, vocab_size] that no working model yields."""
    broken = []
    for fill, num_finite in itertools.product((float("nan"), float("-inf"), float("inf")), (0, vocab_size // 2)):
        logits = torch.full((2, vocab_size), fill)
        logits[0, vocab_size - num_finite :] = logits[1, :num_finite] = random_logits(1, num_finite)
        broken.append(logits)
    return broken


def is_changed_by(
    parameter: FloatParameter, sample_tokens: Callable[..., Tensor], apply_penalties: Callable[..., None]
) -> bool:
    """Returns whether one of the two ops does something else when the parameter is not off."""
    size, name = 8, parameter.name.lower()
    logits, rows = random_logits(1, 300, scale=1.0).expand(size, -1).clone(), torch.arange(size, dtype=torch.int32)
    results = []
    for value in (OFF[name], 0.3):
        floats, token_ids = float_parameters(size, **{name: value}), torch.full((size, 3), 7, dtype=torch.int32)
        num_tokens, penalized = torch.full((size,), 2), logits.clone()
        apply_penalties(penalized, rows, rows, floats, token_ids, num_tokens, num_tokens - 1, None)
        parameters = floats, torch.full((size,), 300), torch.arange(size)
        results.append((penalized, sample_tokens(logits, rows, *parameters, token_ids, num_tokens, None)))
    return not all(torch.equal(*pair) for pair in zip(*results, strict=True))


@dataclass
class DraftedRows:
    """The arguments of `accept_tokens`."""

    sampled: Tensor  # int64 [S]
    rows: Tensor  # int32 [num_reqs]
    sample_start_loc: Tensor  # int32 [num_reqs + 1]
    token_ids: Tensor  # int32 [max_num_seqs, max_model_len]
    num_tokens: Tensor  # int64 [max_num_seqs]
    num_computed_tokens: Tensor  # int64 [max_num_seqs]
    num_gained: Tensor  # int64 [num_reqs]

    def args(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, entry.name) for entry in fields(self))

    def copy(self) -> DraftedRows:
        return copy.deepcopy(self)


def drafted_rows(requests: list[tuple[int, int, bool]], seed: int = 0) -> DraftedRows:
    """Makes rows with drafts. requests: (positions that each is sampled at, drafts of them that are right, whether
    it is padding)."""
    generator = torch.Generator().manual_seed(seed)
    max_num_seqs, longest = len(requests) + 2, 40 + max(count for count, _, _ in requests)
    token_ids = torch.randint(0, 1000, (max_num_seqs, longest), generator=generator, dtype=torch.int32)
    num_tokens = torch.randint(1, 40, (max_num_seqs,), generator=generator)
    rows = torch.randperm(max_num_seqs, generator=generator)[: len(requests)].int()
    sampled = []
    for row, (count, num_right, _) in zip(rows.tolist(), requests, strict=True):
        first = int(num_tokens[row])
        tokens = token_ids[row, first : first + count].long()
        if num_right < count:
            tokens[num_right] += 1
        sampled.append(tokens)
    rows[torch.tensor([is_padding for _, _, is_padding in requests])] = -1
    starts = torch.tensor([0, *(count for count, _, _ in requests)]).cumsum(0).int()
    num_computed_tokens = num_tokens + torch.arange(max_num_seqs)
    num_gained = torch.full((len(requests),), STALE)
    return DraftedRows(torch.cat(sampled), rows, starts, token_ids, num_tokens, num_computed_tokens, num_gained)


def lookup_args(texts: list[list[int]], num_wanted: list[int], longest: int = 3, shortest: int = 1) -> tuple[Any, ...]:
    """The arguments of `look_up_drafts`: each text has a row, in falling order, one more has none."""
    rows = torch.arange(len(texts) - 1, -1, -1, dtype=torch.int32)
    token_ids = torch.full((len(texts) + 1, max(map(len, texts)) + 16), STALE, dtype=torch.int32)
    num_tokens = torch.ones(len(texts) + 1, dtype=torch.int64)
    for row, text in zip(rows.tolist(), texts, strict=True):
        token_ids[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        num_tokens[row] = len(text)
    num_found = torch.full((len(texts),), STALE)
    return rows, torch.tensor(num_wanted, dtype=torch.int32), token_ids, num_tokens, num_found, longest, shortest


def assert_same_rows(actual: DraftedRows, expected: DraftedRows) -> None:
    for entry in fields(DraftedRows):
        assert torch.equal(getattr(actual, entry.name), getattr(expected, entry.name)), entry.name


def suffix_args(
    texts: list[list[int]],
    num_wanted: list[int],
    others: list[int],
    max_depth: int = 8,
    factor: float = 4.0,
    min_share: float = 0.1,
) -> tuple[Any, ...]:
    """The arguments of `draft_by_suffix`; rows as of `lookup_args`."""
    rows, wanted, token_ids, num_tokens, num_found, *_ = lookup_args(texts, num_wanted)
    tokens = torch.tensor(others, dtype=torch.int32)
    return rows, wanted, token_ids, num_tokens, tokens, num_found, max_depth, factor, min_share
