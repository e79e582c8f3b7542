"""A model, by machine code, of how busy prefill attention keeps the tensor cores of sm_90; no measurement.

A program waits in each tile of keys for the scores, and from there to the first product with values the tensor cores
have nothing of it to do. A turn of its loop takes at least

    that stretch, then the longer of the values' products and of what is issued before the next scores, then those

and LATENCY. Scores also take as long as reading the query and the keys from shared memory, once for each product of 64
rows and 16 elements of a head; weights are in registers, and values keep up. Programs of a multiprocessor take turns,
so it comes to their share of a turn, or to the longest of what they share: tensor cores, schedulers (an instruction a
cycle in each of four), exponentials, and copies from the L2 cache. It is assumed that programs never want the same at
once, and that a warp issues in every cycle, so this is a bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.kernels.compiler import ARCHITECTURES, Specialization, compile_for
from benchmarks.kernels.main_loop import count, main_loop
from benchmarks.kernels.wide_report import L2_BYTES, LATENCY, PRODUCTS
from pagewire.kernels import tuning
from pagewire.kernels.triton.attention import prefill_attention

EXPONENTIALS = 16  # a cycle
SHARED_BYTES = 128  # a cycle
GROUP = 4  # query heads per KV head
FULL_WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
FP32 = ("FADD", "FMUL", "FFMA", "FMNMX", "F2F")
PROMPT = {"kv_bytes": 2, "group": GROUP, "batch": 1, "query_len": 1024}

# (head_dim, block_size) -> rows, keys, descriptors, warps, stages
FORMS = {
    (64, 16): ((128, 64, 0, 8, 3), (64, 64, 0, 4, 3)),
    (64, 64): ((128, 64, 1, 4, 3), (128, 64, 1, 8, 3), (64, 64, 1, 4, 3)),
    (128, 16): (
        (128, 64, 0, 8, 3),
        (128, 128, 0, 8, 2),
        (128, 32, 0, 8, 3),
        (64, 64, 0, 4, 3),
    ),
    (128, 64): ((128, 64, 1, 4, 2), (128, 64, 1, 8, 2), (64, 64, 1, 4, 2)),
    (256, 16): (
        (128, 32, 0, 8, 3),
        (128, 64, 0, 8, 2),
        (64, 64, 0, 4, 2),
    ),
    (256, 64): ((128, 64, 1, 8, 2), (128, 32, 0, 8, 3)),
}


@dataclass(frozen=True)
class Loop:
    """The work of a program for a tile of keys."""

    rows: int
    keys: int
    head_dim: int
    warps: int
    registers: int
    shared: int
    programs: int  # that a multiprocessor holds
    instructions: int
    products: int
    exponentials: int
    fp32: int
    barriers: int
    waits: int  # until all products are done
    spills: int  # loads and stores of the stack
    idle: int  # instructions from such a wait to the next product
    beside: int  # from the values' first product to the next scores' first

    @property
    def tensor(self) -> float:
        """Cycles, as all below"""
        return self.rows * self.keys * 2 * self.head_dim / PRODUCTS

    @property
    def scores(self) -> float:
        read = self.rows / 64 * self.head_dim / 16 * 2 * 16 * (64 + self.keys)
        return max(self.tensor / 2, read / SHARED_BYTES)

    @property
    def issue(self) -> float:
        return self.instructions * self.warps / 4

    @property
    def weigh(self) -> float:
        return self.exponentials * self.warps * 32 / EXPONENTIALS

    @property
    def copied(self) -> float:
        """Bytes: keys and values in 16 bits."""
        return 2 * 2 * self.keys * self.head_dim

    @property
    def turn(self) -> float:
        """Cycles of a program that is alone."""
        each = self.warps / 4
        return self.idle * each + max(self.tensor / 2, self.beside * each) + self.scores + LATENCY

    @property
    def cycles(self) -> float:
        """Cycles of the multiprocessor."""
        products = self.scores + self.tensor / 2
        return max(products, self.issue, self.weigh, self.copied / L2_BYTES, self.turn / self.programs)

    @property
    def busy(self) -> float:
        """The share of the cycles in which the tensor cores work."""
        return self.tensor / self.cycles


def form_of(head_dim: int, block_size: int, config: Mapping[str, int]) -> Specialization:
    model = (head_dim, GROUP, block_size, torch.bfloat16, torch.bfloat16, config)
    return Specialization(*prefill_attention.specialization(*model, capability=90))


def loop_of(head_dim: int, block_size: int, config: Mapping[str, int]) -> Loop:
    form = form_of(head_dim, block_size, config)
    loop, used = main_loop(form, 90), compile_for(form, 90)
    wait = loop.index(FULL_WAIT)
    turned = loop[wait + 1 :] + loop[: wait + 1]
    # Values lie across what a product reads of its right side.
    products = [(at, ".tnspB" in text) for at, text in enumerate(turned) if text.startswith("HGMMA")]
    values = min(at for at, of_values in products if of_values)
    scores = min(at for at, of_values in products if not of_values)
    return Loop(
        config["block_m"],
        config["block_n"],
        head_dim,
        config["num_warps"],
        used.registers,
        used.shared,
        used.programs_per_sm(ARCHITECTURES[90]),
        len(loop),
        len(products),
        count(loop, "MUFU"),
        count(loop, *FP32),
        count(loop, "BAR.SYNC"),
        count(loop, FULL_WAIT),
        count(loop, "LDL", "STL"),
        values,
        scores - values,
    )


def tabled(head_dim: int, block_size: int) -> dict[str, int]:
    """Returns the table's configuration for long prompts."""
    return dict(
        tuning.lookup("prefill_attention", 90, **PROMPT, head_dim=head_dim, block_size=block_size)  # type: ignore[arg-type]
    )


def configurations(head_dim: int, block_size: int) -> Iterator[dict[str, int]]:
    names = ("block_m", "block_n", "descriptors", "num_warps", "num_stages")
    for values in FORMS[head_dim, block_size]:
        yield dict(zip(names, values, strict=True))


@cache
def loops(head_dim: int, block_size: int) -> tuple[Loop, ...]:
    """Returns the loops of `configurations`."""
    return tuple(loop_of(head_dim, block_size, config) for config in configurations(head_dim, block_size))


def lines() -> Iterator[str]:
    columns = (
        "head", "page", "rows x keys", "warps", "stages", "form", "registers", "shared KiB", "programs", "instructions",
        "HGMMA", "MUFU", "FP32", "barriers", "full waits", "spills", "idle instructions", "issue cycles",
        "tensor cycles", "bytes a tensor cycle", "cycles a tile", "busy", "table",
    )  # fmt: skip
    yield "| " + " | ".join(columns) + " |"
    yield "|" + " --- |" * len(columns)
    for head_dim, block_size in FORMS:
        table = tabled(head_dim, block_size)
        for config, loop in zip(configurations(head_dim, block_size), loops(head_dim, block_size), strict=True):
            form = "TMA" if config["descriptors"] else "addresses"
            cells = (
                head_dim, block_size, f"{loop.rows} x {loop.keys}", loop.warps, config["num_stages"], form,
                loop.registers, loop.shared // 1024, loop.programs, loop.instructions, loop.products,
                loop.exponentials, loop.fp32, loop.barriers, loop.waits, loop.spills, loop.idle,
                f"{loop.issue:.0f}", f"{loop.tensor:.0f}", f"{loop.copied / loop.tensor:.0f}", f"{loop.cycles:.0f}",
                f"{loop.busy:.2f}", "yes" if config == table else "",
            )  # fmt: skip
            yield "| " + " | ".join(map(str, cells)) + " |"


def run() -> int:
    for line in lines():
        print(line, flush=True)
    return 0
