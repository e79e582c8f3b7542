"""The plan of decode attention against the same in plain Python, in Triton's interpreter. Run by test_values.py."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from triton.runtime.interpreter import GridExecutor

from benchmarks.kernels.slots import Item, plan
from pagewire.kernels.triton.attention.split_cut import cut
from pagewire.kernels.triton.attention.split_plan import split_plan
from pagewire.kernels.triton.common import launch
from tests.kernels.triton.interpreted import run_cases

TABLE_STRIDE = 1000
SLOTS = 396  # three programs on each multiprocessor of an H100


def check(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    heads: tuple[int, int, int] = (32, 8, 128),
    *,
    block_n: int = 64,
    min_split: int = 128,
    block_size: int = 16,
    window: int = 0,
    split_size: int = 0,
    slots: int = SLOTS,
) -> list[Item]:
    """The plan's items, which are those of the specification, and cover each context once."""
    num_heads, num_kv_heads, head_dim = heads
    max_tokens = -(-max(seq_lens) // block_size) * block_size
    made = cut(
        block_n, slots, min_split, num_heads // num_kv_heads, num_kv_heads, head_dim, max_tokens, len(seq_lens),
        sum(query_lens), max(query_lens), split_size,
    )  # fmt: skip
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    words = split_plan(starts, lens, made, TABLE_STRIDE, num_kv_heads, block_n, block_size, window, split_size > 0)
    expected = plan(query_lens, seq_lens, made, num_kv_heads, block_n, block_size, window, split_size > 0)
    assert len(words) == made.num_items >= len(expected), "the grid has fewer programs than there are items"
    assert not words[len(expected) :].any(), "programs without an item have something to do"
    assert items_of(words[: len(expected)]) == expected
    _check_masks(words[: len(expected)], expected, block_n)
    _check_cover(expected, query_lens, seq_lens, window)
    return expected


def items_of(words: torch.Tensor) -> list[Item]:
    return [
        Item(
            request=entry // TABLE_STRIDE, tokens=counts & 0xFF, first_token=token, position=position, first_key=start,
            end=masked + (counts >> 16), first_item=partial, split=splits & 0xFFFF, splits=splits >> 16,
            tiles=counts >> 8 & 0xFF,
        )
        for entry, token, start, masked, position, partial, splits, counts in words.tolist()
    ]  # fmt: skip


def _check_masks(words: torch.Tensor, items: Sequence[Item], block_n: int) -> None:
    """Before `masked`, tiles are whole and seen by every token; behind it, less than one is."""
    for item, masked in zip(items, words[:, 3].tolist(), strict=True):
        assert (masked - item.first_key) % block_n == 0
        seen = min(item.end, item.position + 1)
        assert masked == item.first_key or masked <= seen
        assert seen < masked + block_n


def _check_cover(items: Sequence[Item], query_lens: Sequence[int], seq_lens: Sequence[int], window: int) -> None:
    """Splits of a tile follow each other from the first key that a token sees to the tile's last token."""
    partials = [item.first_item + item.split * item.tiles for item in items]
    assert sorted(partials) == list(range(len(items))), "partials overlap, or leave room between them"
    tiles: dict[int, list[Item]] = {}
    for item in items:
        tiles.setdefault(item.first_item, []).append(item)
    for splits in tiles.values():
        splits.sort(key=lambda item: item.split)
        assert [item.split for item in splits] == list(range(splits[0].splits))
        last, request = splits[-1], splits[0].request
        first_seen = max(seq_lens[request] - query_lens[request] - window + 1, 0) if window else 0
        assert splits[0].first_key <= first_seen
        # Where a tile ends, the splits behind it have no keys.
        for one, other in pairwise(splits):
            assert one.end == max(one.first_key, min(other.first_key, last.position + last.tokens))
        assert last.end == max(last.first_key, last.position + last.tokens)
    ours = {request for request, length in enumerate(seq_lens) if length and 0 < query_lens[request] <= 16}
    assert {item.request for item in items} == ours


LLAMA, SMALL = (32, 8, 128), (14, 2, 64)


def covers(query_lens: Sequence[int], seq_lens: Sequence[int], window: int = 0, split_size: int = 0) -> None:
    check(query_lens, seq_lens, window=window, split_size=split_size)


def decodes(num_reqs: int, seq_len: int, splits: int, shortest: int, heads: tuple[int, int, int] = LLAMA) -> None:
    """Returns into how many splits requests of equal length are cut, and the fewest tokens of one."""
    items = check([1] * num_reqs, [seq_len] * num_reqs, heads)
    assert {item.splits for item in items} == {splits}
    assert min(item.end - item.first_key for item in items) == shortest


def sweep(seed: int) -> None:
    choose = random.Random(seed)
    num_reqs = choose.choice([1, 3, 40, 150])
    query_lens = [choose.choice([1, 1, 1, choose.randint(0, 16), choose.randint(17, 60)]) for _ in range(num_reqs)]
    query_lens[0] = 1
    seq_lens = [q + choose.choice([0, choose.randint(0, 300), choose.randint(0, 9000)]) for q in query_lens]
    seq_lens = [0 if choose.random() < 0.1 else length for length in seq_lens]
    seq_lens[0] += 1
    num_kv_heads = choose.choice([1, 2, 8])
    check(
        query_lens,
        seq_lens,
        (num_kv_heads * choose.randint(1, 8), num_kv_heads, choose.choice([64, 128, 256])),
        block_n=choose.choice([16, 32, 64, 128]),
        min_split=choose.choice([64, 128, 512]),
        block_size=choose.choice([8, 16, 64, 256]),
        window=choose.choice([0, choose.randint(1, 3000)]),
        split_size=choose.choice([0, 0, 64, 200]),
        slots=choose.choice([4, 132, 792]),
    )


def settled() -> None:
    """Attention reads the plan before it waits. Where kernels begin early, one behind the plan's has to wait for it."""
    launched = []
    launch_one = GridExecutor.__call__

    def noted(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        launched.append(executor.fn.__name__)
        launch_one(executor, *args, **kwargs)

    with mock.patch.object(GridExecutor, "__call__", noted):
        decodes(1, 100, 1, 100)
        with mock.patch.object(launch, "_launches_early", lambda device: True):
            decodes(1, 100, 1, 100)
    assert launched == ["split_plan_kernel", "split_plan_kernel", "settled_kernel"]


CASES: dict[str, Callable[[], None]] = {
    # A device's launches are not seen from here.
    **({"settled where kernels begin early": settled} if os.environ.get("TRITON_INTERPRET") == "1" else {}),
    "16 x 4k": partial(decodes, 16, 4096, 3, 1344),
    "64 x 1k": partial(decodes, 64, 1024, 3, 320),
    "64 x 4k": partial(decodes, 64, 4096, 3, 1344),
    "1 x 32k": partial(decodes, 1, 32768, 47, 640),
    "1 x 32k, two KV heads": partial(decodes, 1, 32768, 64, 512, SMALL),
    "one short request": partial(decodes, 1, 100, 1, 100),
    "padding, a prompt and drafts": partial(covers, [1, 5, 1, 40, 16, 0, 127], [700, 333, 0, 900, 16, 0, 0]),
    "windows": partial(covers, [1, 4, 9], [5000, 3, 400], window=300),
    "fixed": partial(covers, [1, 20, 3], [5000, 90, 400], split_size=100),
    "more requests than are looked at together": partial(covers, [1] * 300, [n % 77 * 60 for n in range(300)]),
    "sweep 0": partial(sweep, 0),
    "sweep 1": partial(sweep, 1),
}
SWEEP = {f"sweep {seed}": partial(sweep, seed) for seed in range(100)}


if __name__ == "__main__":
    sys.exit(run_cases(CASES, SWEEP))
