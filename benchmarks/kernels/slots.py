"""A model of how decode attention fills a GPU: the plan in plain Python, and a simulator of the slots of its programs.

    python -m benchmarks.kernels.slots

prints, for every shape that decode has a target for, how many programs there are, in how many waves they start, what
share of the slots works, how many bytes are on their way at once, what share of the keys is prefetched before the
kernel waits for the one before it (where launches overlap), and how often the program that merges splits waits for
them. Slots are what registers and shared memory of the compiled kernel leave room for. A program takes as long as it
has tiles of keys; memory and latencies are not simulated.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.kernels.compiler import ARCHITECTURES, Specialization, compile_for
from benchmarks.kernels.forms.specializations import attention_form
from pagewire.kernels import tuning
from pagewire.kernels.triton.attention.decode_attention import PREFETCHED
from pagewire.kernels.triton.attention.split_cut import MOST_SPLITS, Cut, cut
from pagewire.kernels.triton.attention.split_plan import PROGRAM_COST, SHORT_QUERY, SPLIT_COST

# (query heads, KV heads, head_dim) of Llama 3.1 8B, Qwen2.5 7B and 0.5B
HEADS = ((32, 8, 128), (28, 4, 128), (14, 2, 64))
# (name, compute capability, multiprocessors)
DEVICES = (("H100", 90, 132), ("H200", 90, 132), ("A100", 80, 108))
SHAPES: dict[str, Sequence[int]] = {
    **{f"{batch} x {length}": [length] * batch for batch, length in ((1, 1024), (1, 8192), (8, 1024), (1, 32768))},
    **{f"{batch} x {length}": [length] * batch for batch, length in ((16, 4096), (64, 1024), (64, 4096), (256, 1024))},
    "256 x 128-4096": random.Random(0).choices(range(128, 4097), k=256),
}
PAGE = 16


@dataclass(frozen=True)
class Item:
    """The work of one program for each KV head: keys first .. end."""

    request: int
    tokens: int  # of the query tile
    first_token: int  # in the batch
    position: int  # of it
    first_key: int
    end: int
    first_item: int  # where the tile's partials begin
    split: int
    splits: int
    tiles: int  # query tiles of the request


def plan(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    cut: Cut,
    num_kv_heads: int,
    block_n: int,
    page: int = PAGE,
    window: int = 0,
    is_fixed: bool = False,
) -> list[Item]:
    """Makes the plan that the kernel in `split_plan` makes."""
    page_tokens = min(page, block_n)
    contexts, tiles = [], []
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        contexts.append(max(seq_len - query_len - window + 1, 0) // page_tokens * page_tokens if window else 0)
        is_ours = seq_len > 0 and 0 < query_len <= SHORT_QUERY.value
        tiles.append(-(-query_len // cut.block_q) if is_ours else 0)
    keys = [-(-(s - c) // block_n) if t else 0 for s, c, t in zip(seq_lens, contexts, tiles, strict=True)]
    length = cut.least // block_n if is_fixed else split_length(tiles, keys, cut, num_kv_heads, block_n)
    items: list[Item] = []
    start = first_item = 0
    for request, (query_len, seq_len, context) in enumerate(zip(query_lens, seq_lens, contexts, strict=True)):
        splits = -(-keys[request] // length)
        for split in range(splits):
            bounds = [split * length, (split + 1) * length]
            if not is_fixed:  # the last ones have the odd tiles
                short, odd = divmod(keys[request], splits)
                bounds = [i * short + max(i - (splits - odd), 0) for i in (split, split + 1)]
            for tile in range(tiles[request]):
                first = tile * cut.block_q
                tokens = min(query_len - first, cut.block_q)
                position = seq_len - query_len + first
                first_key = context + bounds[0] * block_n
                # Of a tile that ends before, a split has no keys.
                end = max(first_key, min(context + bounds[1] * block_n, position + tokens))
                of_tile = (first_item + tile, split, splits, tiles[request])
                items.append(Item(request, tokens, start + first, position, first_key, end, *of_tile))
        start += query_len
        first_item += splits * tiles[request]
    return items if is_fixed else sorted(items, key=lambda item: -item.split)


def split_length(tiles: Sequence[int], keys: Sequence[int], cut: Cut, num_kv_heads: int, block_n: int) -> int:
    """Returns the length of a split, in tiles of keys."""
    query_tiles, key_tiles = np.array(tiles), np.array(keys)
    longest, work = max(keys, default=0), np.float32((query_tiles * key_tiles).sum())
    splits = np.arange(1, MOST_SPLITS.value + 1)
    length = np.maximum(-(-longest // splits), 1)
    items = (query_tiles[:, None] * -(-key_tiles[:, None] // length)).sum(axis=0)
    waves = (np.maximum(items * num_kv_heads - 1, 0) // cut.slots).astype(np.float32)
    mean = work / np.maximum(items, 1).astype(np.float32)
    program = np.float32(PROGRAM_COST.value)
    cost = waves * (mean + program) + length.astype(np.float32) + program
    cost = cost + np.where(splits > 1, splits * np.float32(SPLIT_COST.value), np.float32(0))
    possible = (splits == 1) | ((items <= cut.num_items) & (length * block_n >= cut.least))
    return max(int(length[np.where(possible, cost, np.inf).argmin()]), 1)


@dataclass(frozen=True)
class Schedule:
    programs: int
    slots: int
    waves: float
    efficiency: float  # of the time of all slots, until the last program ends, what they work
    programs_at_work: int  # at most, at once
    shortest: int  # tokens of a program
    splits: int  # of a request, at most


def simulate(items: Sequence[Item], num_kv_heads: int, slots: int, block_n: int) -> Schedule:
    """Programs start in the order of the grid, each in the slot that is free first; KV heads are the slower index."""
    lengths = [item.end - item.first_key for item in items]
    free = [0] * slots
    for _ in range(num_kv_heads):
        for length in lengths:
            heapq.heapreplace(free, free[0] + -(-length // block_n))
    programs = len(items) * num_kv_heads
    busy = num_kv_heads * sum(-(-length // block_n) for length in lengths)
    splits = max(item.splits for item in items)
    efficiency = busy / (slots * max(free))
    return Schedule(programs, slots, programs / slots, efficiency, min(programs, slots), min(lengths), splits)


@dataclass(frozen=True)
class Decode:
    """One decode step's attention in one layer."""

    schedule: Schedule
    bytes_in_flight: int
    early: float  # share of keys
    merge_waits: int


@cache
def _form(capability: int, head_dim: int, group: int, batch: int, context: int) -> tuple[Specialization, int]:
    """The compiled form of such a batch, and how many of its programs a multiprocessor holds."""
    shape = {"head_dim": head_dim, "kv_bytes": 2, "block_size": PAGE, "group": group, "batch": batch, "query_len": 1}
    form = attention_form("decode_attention", capability, shape | {"context": context})
    return form, compile_for(form, capability).programs_per_sm(ARCHITECTURES[capability])


def decode(heads: tuple[int, int, int], capability: int, multiprocessors: int, seq_lens: Sequence[int]) -> Decode:
    num_heads, num_kv_heads, head_dim = heads
    group, batch, longest = num_heads // num_kv_heads, len(seq_lens), max(seq_lens)
    form, programs = _form(capability, head_dim, group, batch, longest)
    shape = {"head_dim": head_dim, "kv_bytes": 2, "block_size": PAGE, "group": group, "batch": batch, "query_len": 1}
    config = tuning.lookup("decode_attention", capability, **shape, context=longest)
    made = cut(
        config["block_n"], config["programs_per_sm"] * multiprocessors, config["min_split"], group, num_kv_heads,
        head_dim, -(-longest // PAGE) * PAGE, batch, batch, 1, 0,
    )  # fmt: skip
    items = plan([1] * batch, seq_lens, made, num_kv_heads, config["block_n"])
    schedule = simulate(items, num_kv_heads, programs * multiprocessors, config["block_n"])
    # The stages but the one that is computed with, keys and values of 16 bits.
    in_flight = (form.num_stages - 1) * config["block_n"] * head_dim * 4
    lengths = [-(-(item.end - item.first_key) // config["block_n"]) for item in items]
    first_ones = lengths[: schedule.programs_at_work // num_kv_heads or 1]
    early = sum(length if length <= PREFETCHED.value else 1 for length in first_ones) / sum(lengths)
    merged = -(-schedule.splits // form.constants["MERGED"])
    waits = 0 if schedule.splits == 1 else -(-merged // max(1, form.constants["MERGE_STAGES"] - 1))
    return Decode(schedule, schedule.programs_at_work * in_flight, early, waits)


def lines() -> Iterator[str]:
    yield (
        "| device | heads | shape | programs | slots | waves | at work | MB in flight | early | splits | merge waits | "
        "shortest |"
    )
    yield "| --- |" + " --- |" * 11
    for name, capability, multiprocessors in DEVICES:
        for heads in HEADS:
            for shape, seq_lens in SHAPES.items():
                found = decode(heads, capability, multiprocessors, seq_lens)
                schedule = found.schedule
                cells = [name, "{}/{}, {}".format(*heads), shape, schedule.programs, schedule.slots]
                cells += [f"{schedule.waves:.2f}", f"{schedule.efficiency:.2f}", f"{found.bytes_in_flight / 1e6:.1f}"]
                cells += [f"{found.early:.2f}", schedule.splits, found.merge_waits, schedule.shortest]
                yield "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    print("\n".join(lines()))
