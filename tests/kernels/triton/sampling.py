"""The sampling kernels against their references, in Triton's interpreter on the CPU. Run by test_values.py as

    TRITON_INTERPRET=1 python -m tests.kernels.triton.sampling [--sweep]

in a process of its own, because Triton reads the variable when a kernel is defined. With --sweep, random
batches instead.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pagewire.kernels import reference
from pagewire.kernels.ops import NOT_A_NUMBER
from pagewire.kernels.sampling_parameters import FloatParameter
from pagewire.kernels.triton.drafts import accept_tokens as drafts
from pagewire.kernels.triton.drafts import look_up_drafts as lookup
from pagewire.kernels.triton.sampling import logprobs, penalties, sampling, token_masks
from tests.kernels.sampling_batches import (
    BROKEN_LINES,
    STALE,
    Row,
    SamplingBatch,
    assert_broken,
    assert_same,
    assert_same_rows,
    broken_logits,
    drafted_rows,
    float_parameters,
    is_changed_by,
    lookup_args,
    random_logits,
    random_masks,
)
from tests.kernels.triton.interpreted import run_cases

INF = float("inf")
MIX = [
    Row(temperature=0.0, position=3),
    Row(seed=1, position=7),
    Row(temperature=0.7, top_k=5, seed=-2),
    Row(temperature=1.3, top_p=0.6, seed=2**62),
    Row(temperature=0.9, min_p=0.02, seed=4, position=1),
    Row(padding=True),
    Row(temperature=1.1, top_k=40, top_p=0.8, min_p=0.001, seed=5),
    Row(temperature=2.0, top_p=0.05, seed=6),
]


def check(logits: Tensor, lines: list[Row]) -> Tensor:
    """Returns the tokens, which are the reference's."""
    actual = SamplingBatch(logits, lines)
    expected = actual.copy()
    before = logits.clone()
    sampled = sampling.sample_tokens(*actual.args())
    assert_same(actual, sampled, expected, reference.sample_tokens(*expected.args()))
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "logits are not changed"
    return sampled


def mixes() -> None:
    for seed, (vocab_size, scale) in enumerate([(1000, 1.0), (640, 3.0), (1283, 0.1)]):
        check(random_logits(len(MIX), vocab_size, seed=seed, scale=scale), MIX)


def dtypes() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        check(random_logits(len(MIX), 700, scale=1.0).to(dtype), MIX)


def strided_logits() -> None:
    check(random_logits(len(MIX), 700, scale=1.0)[:, 3:603], MIX)


def small_vocabularies() -> None:
    lines = [Row(temperature=0.0), Row(seed=3), Row(top_k=1, seed=2), Row(top_k=2, top_p=0.5, seed=9)]
    for vocab_size in (2, 127, 128, 129):
        check(random_logits(4, vocab_size, scale=0.5), lines)


def ties() -> None:
    """Greedy takes the lowest id of equals; truncation keeps or drops them together."""
    logits = torch.randint(0, 3, (8, 400), generator=torch.Generator().manual_seed(1)).float()
    logits[0] = 0.0
    logits[0, [70, 300, 350]] = 9.0
    logits[1, ::2], logits[1, 1::2] = 0.0, -0.0
    lines = [Row(temperature=0.0), Row(top_k=3, top_p=0.4), *[Row(top_k=k, seed=k) for k in (1, 2, 130, 300, 399, 400)]]
    assert check(logits, lines)[0] == 70


def extremes() -> None:
    logits = random_logits(5, 300, scale=1.0)
    lines = [Row(top_k=1), Row(top_p=1e-7), Row(min_p=1.0), Row(temperature=1e-5), Row(top_p=0.999999)]
    assert torch.equal(check(logits, lines)[:4], logits[:4].argmax(-1))


def infinities() -> None:
    logits = random_logits(6, 300, scale=1.0)
    logits[:, 10:] = -INF
    logits[3:] = -INF
    logits[3:, 299] = 1.0  # one token only
    lines = [
        Row(top_k=30, seed=1),
        Row(top_p=0.5),
        Row(min_p=0.1),
        Row(),
        Row(top_k=5, top_p=0.9),
        Row(temperature=0.0),
    ]
    sampled = check(logits, lines)
    assert (sampled[:3] < 10).all()
    assert sampled[3:].tolist() == [299] * 3


def broken_models() -> None:
    """Ids of the vocabulary, or none, and an end."""
    for logits in broken_logits(200):
        for lines in BROKEN_LINES:
            batch = SamplingBatch(logits, lines)
            assert_broken(batch, sampling.sample_tokens(*batch.args()))


def nan_among_numbers() -> None:
    """One is enough, in any group; a row with no other gets its token."""
    logits = random_logits(len(MIX), 700, scale=1.0)
    for line, token_id in ((0, 699), (2, 0), (3, 130), (6, 500)):
        logits[line, token_id] = float("nan")
    sampled = check(logits, MIX)
    assert (sampled[[0, 2, 3, 6]] == NOT_A_NUMBER).all() and (sampled[[1, 4, 7]] >= 0).all()


def rejections() -> None:
    """Flat distributions with a small nucleus: many rounds."""
    check(random_logits(16, 300, scale=0.3), [Row(top_p=0.01 + 0.02 * seed, seed=seed) for seed in range(16)])


def nothing_to_do() -> None:
    check(random_logits(2, 300), [Row(padding=True), Row(padding=True)])
    empty = SamplingBatch(random_logits(1, 300), [Row()])
    assert len(sampling.sample_tokens(empty.logits[:0], empty.rows[:0], *empty.args()[2:])) == 0


def every_parameter() -> None:
    for parameter in FloatParameter:
        assert is_changed_by(parameter, sampling.sample_tokens, penalties.apply_penalties), parameter.name


def penalties_case() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = random_logits(4, 300)
    rows, batch_indices = torch.tensor([2, 0, 4], dtype=torch.int32), torch.tensor([3, 0, 1], dtype=torch.int32)
    token_ids = torch.randint(0, 40, (5, 6000), generator=generator, dtype=torch.int32)
    num_tokens, num_prompt_tokens = torch.tensor([1, 5, 5500, 7, 600]), torch.tensor([1, 3, 4000, 2, 0])
    floats = float_parameters(
        5,
        repetition_penalty=[1.2, 1.0, 0.7, 1.0, 1.5],
        presence_penalty=[0.3, 0.0, 0.0, 1.0, 0.5],
        frequency_penalty=[0.1, 0.2, 0.3, 0.4, -0.5],
    )
    columns = (batch_indices, rows, floats, token_ids, num_tokens, num_prompt_tokens)
    for offsets in (None, torch.tensor([0, 7, 2], dtype=torch.int32)):
        actual, expected = logits.clone(), logits.clone()
        penalties.apply_penalties(actual, *columns, offsets)
        reference.apply_penalties(expected, *columns, offsets)
        torch.testing.assert_close(actual, expected)
        assert torch.equal(actual[2], logits[2])


def masks_case() -> None:
    for vocab_size in (31, 300, 5000):
        logits, batch_indices = random_logits(4, vocab_size), torch.tensor([3, 0], dtype=torch.int32)
        masks = random_masks(2, vocab_size)
        actual, expected = logits.clone(), logits.clone()
        token_masks.mask_tokens(actual, batch_indices, masks)
        reference.mask_tokens(expected, batch_indices, masks)
        assert torch.equal(actual, expected)
    token_masks.mask_tokens(actual, batch_indices[:0], masks[:0])
    assert torch.equal(actual, expected)


def drafts_case() -> None:
    """Positions of one row, and none of them appended."""
    lines = [replace(line, offset=offset) for offset, line in enumerate(MIX)]
    actual = SamplingBatch(random_logits(len(lines), 700, scale=1.0), lines, drafts=True)
    actual.rows[6] = actual.rows[1]
    expected = actual.copy()
    expected.rows[6] = expected.rows[1]
    sampled, wanted = sampling.sample_tokens(*actual.args()), reference.sample_tokens(*expected.args())
    assert_same(actual, sampled, expected, wanted)
    assert (actual.token_ids == STALE).all()


def acceptance_case() -> None:
    counts = [(1, 0), (1, 1), (4, 0), (4, 2), (4, 3), (4, 4), (70, 32), (70, 70), (0, 0)]
    for seed, padding in enumerate((False, True)):
        actual = drafted_rows([(*count, padding and index % 3 == 1) for index, count in enumerate(counts)], seed)
        expected = actual.copy()
        drafts.accept_tokens(*actual.args())
        reference.accept_tokens(*expected.args())
        assert_same_rows(actual, expected)
    actual = drafted_rows([(4, 4, False), (1, 1, False)])
    actual.sampled[2] = actual.sampled[4] = NOT_A_NUMBER
    expected = actual.copy()
    drafts.accept_tokens(*actual.args())
    reference.accept_tokens(*expected.args())
    assert_same_rows(actual, expected)


def lookup_case() -> None:
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 4, (length,), generator=generator).tolist() for length in (1, 2, 3, 40, 1025, 2100)]
    texts += [[*range(1500), 7], [5, 7, 5, 7]]
    for longest, shortest in ((1, 1), (3, 2), (5, 5)):
        wanted = torch.randint(0, 17, (len(texts),), generator=generator).tolist()
        actual, expected = (lookup_args(texts, wanted, longest, shortest) for _ in range(2))
        lookup.look_up_drafts(*actual)
        reference.look_up_drafts(*expected)
        for ours, theirs in zip(actual[:5], expected[:5], strict=True):
            assert torch.equal(ours, theirs)


def logprobs_case() -> None:
    logits = random_logits(5, 1001)
    logits[1] = torch.randint(0, 3, (1001,), generator=torch.Generator().manual_seed(0)).float()
    logits[2], logits[2, 700] = -INF, 1.0
    logits[3, ::2], logits[3, 1::2] = 0.0, -0.0
    for dtype, num_top in ((torch.float32, 0), (torch.float32, 20), (torch.float16, 5), (torch.bfloat16, 3)):
        compare_logprobs(logits.to(dtype), torch.tensor([5, 1000, 3, 7, 250]), num_top)
    compare_logprobs(random_logits(2, 130), torch.tensor([129, 0]), 130)


def compare_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> None:
    ids, values, ranks = logprobs.token_logprobs(logits, token_ids, num_top)
    expected_ids, expected_values, expected_ranks = reference.token_logprobs(logits, token_ids, num_top)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(ranks, expected_ranks)
    torch.testing.assert_close(values, expected_values, atol=1e-5, rtol=1e-5)


def broken_logprobs() -> None:
    ids, values, ranks = logprobs.token_logprobs(torch.full((1, 200), float("nan")), torch.tensor([7]), 5)
    assert ((ids >= 0) & (ids < 200)).all()
    assert values.isnan().all()
    assert (ranks >= 1).all()


def sweep_case(seed: int) -> None:
    choice = random.Random(seed).choice
    vocab_size = choice([5, 128, 300, 513, 777])
    logits = random_logits(4, vocab_size, seed=seed, scale=choice([0.01, 0.3, 1.0, 5.0, 30.0]))
    if choice([True, False, False]):
        logits = logits.round()  # many equals
    if choice([True, False, False]):
        logits[:, :: choice([2, 3])] = -INF
    lines = [
        Row(
            temperature=choice([0.0, 1e-5, 0.3, 1.0, 2.0]),
            top_k=choice([0, 0, 1, 2, min(50, vocab_size - 1), vocab_size - 1]),
            top_p=choice([1.0, 0.9, 0.33, 0.01]),
            min_p=choice([0.0, 0.0, 0.01, 0.4]),
            seed=seed - 10 * line,
            position=line,
            padding=choice([False] * 9 + [True]),
        )
        for line in range(4)
    ]
    check(logits, lines)


CASES: dict[str, Callable[[], None]] = {
    "every mix of parameters": mixes,
    "fp16, bf16": dtypes,
    "strided logits": strided_logits,
    "small vocabularies": small_vocabularies,
    "ties": ties,
    "extremes": extremes,
    "infinities": infinities,
    "broken models": broken_models,
    "NaN among numbers": nan_among_numbers,
    "many rejections": rejections,
    "padding, empty": nothing_to_do,
    "every parameter": every_parameter,
    "penalties": penalties_case,
    "masks": masks_case,
    "drafts": drafts_case,
    "acceptance of drafts": acceptance_case,
    "drafts by lookup": lookup_case,
    "log probabilities": logprobs_case,
    "log probabilities, broken model": broken_logprobs,
}


SWEEP: dict[str, Callable[[], None]] = {f"sweep {seed}": partial(sweep_case, seed) for seed in range(300)}


if __name__ == "__main__":
    # log(0) = -inf and inf - inf = NaN are meant.
    warnings.filterwarnings("ignore", "divide by zero|invalid value", RuntimeWarning)
    sys.exit(run_cases(CASES, SWEEP))
