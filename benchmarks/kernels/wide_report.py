"""A model, by machine code, of products of 4-bit weights with many rows on sm_90; no measurement.

A tile of inputs takes a multiprocessor the longest of: its tensor cores' cycles, its schedulers' (an instruction a
cycle in each of four), and what it copies from the L2 cache. Products of half a tile are in flight when the next tile
begins; what is done before that tile's first product and takes longer is added. A dense product is modelled alike, in
the best of cuBLAS's usual blocks, beside its floor: arithmetic at the rate of large products, and memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from benchmarks.gpu.cases.product_cases import SHAPES
from benchmarks.kernels.compiler import ARCHITECTURES, Specialization, compile_for
from benchmarks.kernels.forms.grouped_products import product
from benchmarks.kernels.main_loop import count, main_loop
from pagewire.kernels import tuning
from pagewire.kernels.triton.products.grouped_gemm import FIXED_TILES, WIDE_SPLIT_TILES, split_tiles_of

MULTIPROCESSORS = 132
PRODUCTS = 2048  # multiply-adds in 16 bits a cycle, of a multiprocessor's tensor cores
# Of an H200, measured: products of random data, and copies. The clock is that at which the tensor cores do so many.
FLOPS, BANDWIDTH = 790e12, 4.3e12
CLOCK = FLOPS / (2 * PRODUCTS * MULTIPROCESSORS)
# From the L2 cache, a cycle and multiprocessor: what blocks of 128 x 256 in pairs, as cuBLAS has them, read at that
# rate.
L2_BYTES = 32
LATENCY = 150  # of a barrier and what is read of shared memory behind it, before the first instruction of a tile
TILE_INPUTS = 128
NUM_TOKENS = (128, 256, 512, 2048)
# Of a dense product: rows, outputs
DENSE_BLOCKS = ((128, 256), (256, 128), (128, 128), (192, 128), (64, 256), (64, 128))
BLOCKS = ((128, 64, 4), (128, 128, 8), (128, 256, 8), (256, 128, 8))  # rows, outputs, warps


@dataclass(frozen=True)
class Loop:
    """The work of a program for a tile of inputs."""

    rows: int
    outputs: int
    registers: int
    programs: int  # that a multiprocessor holds
    instructions: int
    issue: float  # cycles
    first: float  # of them before the first product
    barriers: int
    waits: int  # until all products are done

    @property
    def tensor(self) -> float:
        return self.rows * self.outputs * TILE_INPUTS / PRODUCTS

    @property
    def copied(self) -> float:
        """Bytes"""
        return TILE_INPUTS * (2 * self.rows + self.outputs / 2) + 4 * self.outputs

    @property
    def cycles(self) -> float:
        """Cycles of the multiprocessor."""
        busiest = max(self.tensor, self.issue, self.copied / L2_BYTES)
        if self.programs > 1:
            return busiest
        return max(busiest, self.tensor + max(0.0, self.first + LATENCY - self.tensor / 2))


def loop_of(config: Mapping[str, int], *, zeros: bool) -> Loop:
    """Returns the form for an AWQ weight (zeros) or a GPTQ one, with bf16."""
    form: Specialization = product(config, zeros=zeros)
    loop, used = main_loop(form, 90), compile_for(form, 90)
    first = min(at for at, text in enumerate(loop) if text.startswith("HGMMA"))
    return Loop(
        config["block_m"],
        config["block_n"],
        used.registers,
        used.programs_per_sm(ARCHITECTURES[90]),
        len(loop),
        len(loop) * form.num_warps / 4,
        first * form.num_warps / 4,
        count(loop, "BAR.SYNC"),
        count(loop, "WARPGROUP.DEPBAR.LE gsb0, 0x0"),
    )


@cache
def _loop(rows: int, outputs: int, warps: int, wide: int, zeros: bool) -> Loop:
    config = {"block_m": rows, "block_n": outputs, "num_warps": warps, "num_stages": 3, "wide": wide}
    return loop_of(config, zeros=zeros)


def seconds(shape: tuple[int, int], num_tokens: int) -> tuple[float, str]:
    """Returns the loop of the product of an AWQ weight as the table has it, and its blocks."""
    outputs, inputs = shape
    config = tuning.lookup("grouped_gemm", 90, bits=4, group=128, tokens=num_tokens, outputs=outputs, inputs=inputs)
    loop = _loop(config["block_m"], config["block_n"], config["num_warps"], config["wide"], True)
    blocks = -(-outputs // loop.outputs) * -(-num_tokens // loop.rows)
    tiles = inputs // TILE_INPUTS
    split = split_tiles_of(blocks, tiles, MULTIPROCESSORS, config)
    programs = blocks * -(-tiles // split)
    cycles = _rounds(programs) * _split_tiles(tiles, split) * loop.cycles
    moved = outputs * inputs * 0.52 + 2 * num_tokens * (outputs + inputs)
    return max(cycles / CLOCK, moved / BANDWIDTH), f"{loop.outputs} x {loop.rows}, {programs}"


def dense_floor(shape: tuple[int, int], num_tokens: int) -> float:
    outputs, inputs = shape
    moved = 2 * (outputs * inputs + num_tokens * (outputs + inputs))
    return max(2 * num_tokens * outputs * inputs / FLOPS, moved / BANDWIDTH)


def dense_seconds(shape: tuple[int, int], num_tokens: int) -> float:
    """Returns the cycles in equal blocks, of which pairs share what they read of the larger side, and equal splits."""
    tiles, found = shape[1] // TILE_INPUTS, []
    for rows, outputs in DENSE_BLOCKS:
        copied = 2 * TILE_INPUTS * (min(rows, outputs) + max(rows, outputs) / 2)
        cycles = max(rows * outputs * TILE_INPUTS / PRODUCTS, copied / L2_BYTES)
        blocks = -(-shape[0] // outputs) * -(-num_tokens // rows)
        found += [
            _rounds(blocks * splits) * _split_tiles(tiles, -(-tiles // splits)) * cycles for splits in range(1, 9)
        ]
    return max(min(found) / CLOCK, dense_floor(shape, num_tokens))


def _split_tiles(tiles: int, split: int) -> int:
    """What a program takes that does `split` of so many, in tiles."""
    return split + FIXED_TILES + (WIDE_SPLIT_TILES if split < tiles else 0)


def _rounds(programs: int) -> int:
    return -(-programs // MULTIPROCESSORS)


def lines() -> Iterator[str]:
    counts = (
        "outputs x rows", "warps", "registers", "programs a multiprocessor", "instructions", "barriers", "full waits",
        "issue cycles", "tensor cycles", "bytes copied a tensor cycle", "cycles a tile",
    )  # fmt: skip
    yield "| weight | " + " | ".join(counts) + " |"
    yield "| --- |" + " --- |" * len(counts)
    for zeros in (True, False):
        for rows, outputs, warps in BLOCKS:
            yield _line("AWQ" if zeros else "GPTQ", warps, _loop(rows, outputs, warps, 1, zeros))
    yield _line("AWQ, sums scaled", 8, _loop(128, 128, 8, 0, True))
    yield ""
    columns = (
        "rows",
        "blocks, programs",
        "us",
        "dense us",
        "dense / ours",
        "floor / ours",
        "floor / dequantized first",
    )
    yield "| weight | " + " | ".join(columns) + " |"
    yield "| --- |" + " --- |" * len(columns)
    for shape, num_tokens in itertools.product(SHAPES, NUM_TOKENS):
        ours, blocks = seconds(shape, num_tokens)
        floor, dense = dense_floor(shape, num_tokens), dense_seconds(shape, num_tokens)
        dequantized = floor + shape[0] * shape[1] * 2.52 / BANDWIDTH
        cells = (
            f"{shape[0]} x {shape[1]}", num_tokens, blocks, f"{ours * 1e6:.0f}", f"{dense * 1e6:.0f}",
            f"{dense / ours:.2f}", f"{floor / ours:.2f}", f"{floor / dequantized:.2f}",
        )  # fmt: skip
        yield "| " + " | ".join(map(str, cells)) + " |"


def _line(name: str, warps: int, loop: Loop) -> str:
    cells = (
        f"{loop.outputs} x {loop.rows}", warps, loop.registers, loop.programs, loop.instructions, loop.barriers,
        loop.waits, f"{loop.issue:.0f}", f"{loop.tensor:.0f}", f"{loop.copied / loop.tensor:.0f}", f"{loop.cycles:.0f}",
    )  # fmt: skip
    return f"| {name} | " + " | ".join(map(str, cells)) + " |"


def run() -> int:
    for line in lines():
        print(line, flush=True)
    return 0
