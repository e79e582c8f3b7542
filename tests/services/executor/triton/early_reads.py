"""Checks in Triton's interpreter what decode attention reads before it waits, while the kernels of steps run. Run by
test_triton_executor.py as

    TRITON_INTERPRET=1 PAGEWIRE_CPU_KERNELS=triton python -m tests.services.executor.triton.early_reads DIRECTORY

in a process of its own. Prints as JSON, for the steps as they are and with two mistakes, which kernels wrote to the
plan or to a block table with no kernel between them and attention that begins when all before it have ended.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from pagewire.kernels.triton.attention import paged_attention, split_plan
from pagewire.kernels.triton.common import launch
from pagewire.services.executor.start.assembly import assemble
from tests.kernels.triton.interpreted import quick_interpreter
from tests.services.executor.helpers.stepping import CPU, LIMITS, Driver, prompt, tiny_llama

READ_EARLY = ("plan_ptr", "block_table_ptr")


class Launches:
    """Follows kernels in the order in which they are launched."""

    def __init__(self) -> None:
        self.faults: set[str] = set()
        self.num_reads = 0
        self._unsettled: list[tuple[str, Tensor]] = []  # what kernels wrote since one last waited for all before it

    def launched(self, run: Callable[..., Any], executor: GridExecutor, *arguments: Any, **options: Any) -> None:
        is_early = options.pop("launch_pdl", False)
        name, given = executor.fn.__name__, dict(zip(executor.arg_names, arguments, strict=False))
        if name == "settled_kernel" or not is_early:  # such a kernel begins behind all, and what follows behind it
            self._unsettled.clear()
        if name == "decode_attention_kernel":
            self.num_reads += 1
            for read in READ_EARLY:
                self.faults |= {f"{by} writes {read}" for by, there in self._unsettled if overlap(there, given[read])}
        tensors = [value for value in given.values() if isinstance(value, Tensor) and value.dtype == torch.int32]
        before = [tensor.clone() for tensor in tensors]
        run(executor, *arguments, **options)
        for tensor, old in zip(tensors, before, strict=True):
            if is_early and not torch.equal(tensor, old):
                self._unsettled.append((name, tensor))


def overlap(one: Tensor, other: Tensor) -> bool:
    begins, ends = zip(
        *((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (one, other)), strict=True
    )
    return max(begins) < min(ends)


@contextmanager
def followed() -> Iterator[Launches]:
    launches, run = Launches(), GridExecutor.__call__
    call = lambda executor, *arguments, **options: launches.launched(run, executor, *arguments, **options)  # noqa: E731
    with (
        quick_interpreter(),
        mock.patch.object(GridExecutor, "__call__", call),
        mock.patch.object(launch, "_launches_early", lambda device: True),
    ):
        yield launches


def steps(path: Path) -> dict[str, Any]:
    """A prompt, then two decode steps beside the prompt of another request."""
    with followed() as launches:
        driver = Driver(assemble(tiny_llama(path), LIMITS, 32, CPU), 32)
        driver.add(0, prompt(11))
        driver.step({0: 11})
        driver.add(1, prompt(3, seed=1))
        driver.step({0: 1, 1: 3})
        driver.step({0: 1, 1: 1})
    return {"faults": sorted(launches.faults), "reads": launches.num_reads}


@triton.jit
def careless_kernel(table_ptr):
    launch.wait_for_inputs()
    tl.store(table_ptr, tl.load(table_ptr) + 1)
    tl.store(table_ptr, tl.load(table_ptr) - 2)


def carelessly(attention: Callable[..., None]) -> Callable[..., None]:
    """Attention behind a kernel that writes to the block table."""

    def attend(query: Tensor, kv_cache: Tensor, out: Tensor, block_table: Tensor, *rest: Any, **options: Any) -> None:
        row = block_table[0].clone()
        careless_kernel[(1,)](block_table, **launch.dependent_launch(CPU))
        block_table[0] = row
        attention(query, kv_cache, out, block_table, *rest, **options)

    return attend


def main() -> None:
    path = Path(sys.argv[1])
    found = {"as they are": steps(path)}
    mistakes = {
        "without settling": mock.patch.object(split_plan, "settle", lambda device: None),
        "with a table written": mock.patch.object(
            paged_attention, "decode_attention", carelessly(paged_attention.decode_attention)
        ),
    }
    for name, mistake in mistakes.items():
        with ExitStack() as patches:
            patches.enter_context(mistake)
            found[name] = steps(path)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
