"""Measure the launch configurations of a kernel and write its tuning table (`pagewire.kernels.tuning`)."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from benchmarks.gpu.measure import Call, median_seconds
from benchmarks.gpu.report import Budget, device_name
from benchmarks.kernels.problem_sets import Problem, problems_of
from benchmarks.kernels.shapes import Shape, tuned_shapes
from pagewire.kernels import tuning
from pagewire.kernels.tuning import KERNELS, Entry, nearest

Config = Mapping[str, int]


# As library_rows and gemm_rows: more tokens than there are.
ALWAYS_OURS = 1 << 30
_PRODUCT_TILES: dict[str, tuple[int, ...]] = {
    "block_m": (16, 32, 64, 128),
    "block_n": (64, 128),
    "block_k": (64, 128),
    "num_warps": (4, 8),
    "num_stages": (3, 4),
}
# What a kernel is compiled for. All combinations are tried.
COMPILED: dict[str, dict[str, tuple[int, ...]]] = {
    "decode_attention": {"block_n": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
    "prefill_attention": {
        "block_m": (64, 128),
        "block_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (2, 3),
    },
    "fp8_product": {**_PRODUCT_TILES, "library_rows": (ALWAYS_OURS,)},
    "fp8_weight_only": {**_PRODUCT_TILES, "library_rows": (ALWAYS_OURS,)},
    "int8_product": _PRODUCT_TILES,
    "grouped_gemm": {
        "block_m": (8, 16, 32, 64, 128),
        "block_n": (64, 128, 256),
        "num_warps": (2, 4, 8),
        "num_stages": (3, 4, 5),
        "library_rows": (ALWAYS_OURS,),
    },
    "grouped_gemv": {
        "block_n": (64, 128, 256),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 3, 4),
        "gemm_rows": (ALWAYS_OURS,),
    },
}
# What a launch decides. All combinations are tried with the best compiled forms.
LAUNCHED: dict[str, dict[str, tuple[int, ...]]] = {
    "decode_attention": {"programs_per_sm": (1, 2, 3, 4), "min_split": (64, 128, 256, 512)},
    "prefill_attention": {},
    "fp8_product": {"programs_per_sm": (1, 2, 3, 4), "library_rows": (1, ALWAYS_OURS)},
    "fp8_weight_only": {"programs_per_sm": (1, 2, 3, 4), "library_rows": (1, ALWAYS_OURS)},
    "int8_product": {"programs_per_sm": (1, 2, 3, 4)},
    "grouped_gemm": {"programs_per_sm": (1, 2, 3, 4, 6, 8), "library_rows": (1, ALWAYS_OURS)},
    "grouped_gemv": {"programs_per_sm": (1, 2, 3, 4, 6, 8), "gemm_rows": (1, ALWAYS_OURS)},
}
NUM_FINALISTS = 3
# A configuration replaces the present one if it takes at most this share of its time: less is noise.
WORTH_A_CHANGE = 0.98


@dataclass
class Search:
    """What came of one shape. Times are geometric means over its problems, in seconds per call."""

    present: Config
    seconds: dict[tuple[int, ...], float] = field(default_factory=dict)  # by the configuration's values
    refused: int = 0  # too large for the device, or for the compiler
    wrong: list[str] = field(default_factory=list)

    @property
    def best(self) -> Config:
        fastest = min(self.seconds, key=self.seconds.__getitem__)
        present = self.seconds.get(tuple(self.present.values()), math.inf)
        if self.seconds[fastest] > WORTH_A_CHANGE * present:
            return self.present
        return dict(zip(self.present, fastest, strict=True))

    def describe(self) -> str:
        seconds = self.seconds[tuple(self.best.values())]
        gain = self.seconds.get(tuple(self.present.values()), math.nan) / seconds
        chosen = " ".join(f"{key}={value}" for key, value in self.best.items())
        tried = f"{len(self.seconds)} tried, {self.refused} refused, {len(self.wrong)} wrong"
        return f"{chosen}: {seconds * 1e6:.1f} us, x{gain:.2f} of the present table's speed ({tried})"


@contextmanager
def forced(kernel: str, config: Config) -> Iterator[None]:
    """Within the block `kernel` runs as configured, whatever its table says."""
    look_up = tuning.lookup

    def lookup(name: str, capability: int, **shape: int) -> Config:
        return config if name == kernel else look_up(name, capability, **shape)

    with mock.patch.object(tuning, "lookup", lookup):
        yield


def search(kernel: str, shape: Shape, device: torch.device) -> Search:
    """Times the configurations of a shape. In the interpreter, where all are slow, no more than two forms."""
    compiled, launched = COMPILED[kernel], LAUNCHED[kernel]
    if device.type == "cpu":
        compiled, launched = {"block_n": (16,)}, {key: values[:1] for key, values in launched.items()}
    result = Search(dict(tuning.lookup(kernel, tuning.capability_of(device), **shape)))
    problems = problems_of(kernel, shape, device)
    _measure(kernel, problems, _variations([result.present], compiled), device, result)
    fastest = sorted(result.seconds, key=result.seconds.__getitem__)[:NUM_FINALISTS]
    finalists: list[Config] = [dict(zip(result.present, values, strict=True)) for values in fastest]
    _measure(kernel, problems, _variations(finalists, launched), device, result)
    return result


def _variations(configs: list[Config], grid: dict[str, tuple[int, ...]]) -> list[Config]:
    """Each configuration, and it with every combination of the grid's values."""
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [*configs, *({**config, **values} for config in configs for values in combinations)]


def _measure(
    kernel: str, problems: Sequence[Problem], configs: list[Config], device: torch.device, result: Search
) -> None:
    """Times the configurations that are right on every problem, in turn."""
    good: dict[tuple[int, ...], Config] = {}
    for config in configs:
        key = tuple(config.values())
        if key in result.seconds or key in good:
            continue
        try:
            with forced(kernel, config):
                right = all(problem.is_right() for problem in problems)
        except (triton.runtime.errors.OutOfResources, triton.compiler.CompilationError):
            result.refused += 1
            continue
        if right:
            good[key] = config
        else:
            result.wrong.append(f"{kernel} {dict(config)} differs from the reference")
    logarithms = dict.fromkeys(good, 0.0)
    for problem in problems:
        contestants = {str(key): _forced_calls(kernel, config, problem) for key, config in good.items()}
        times = median_seconds(contestants, device) if good else {}
        for key in good:
            logarithms[key] += math.log(times[str(key)]) / len(problems)
    result.seconds |= {key: math.exp(value) for key, value in logarithms.items()}


def _forced_calls(kernel: str, config: Config, problem: Problem) -> list[Call]:
    def forced_call(call: Call) -> None:
        with forced(kernel, config):
            call()

    return [lambda call=call: forced_call(call) for call in problem.calls()]  # type: ignore[misc]


def run(arguments: argparse.Namespace, command: str) -> int:
    """`python -m benchmarks.kernels tune`; the exit code."""
    device = torch.device(arguments.device)
    which = arguments.shapes or ("tiny" if device.type == "cpu" else "small")
    budget = Budget(arguments.budget)
    wrong = []
    for kernel in arguments.kernel or KERNELS:
        shapes = tuned_shapes(kernel, which, tuning.capability_of(device))
        wrong += tune(kernel, shapes, device, arguments.out or tuning.DIRECTORY, budget, command)
    for label in budget.left_out:
        print(f"left out for lack of time (--budget): {label}")
    for line in wrong:
        print(f"WRONG: {line}")
    print("Then: python -m benchmarks.kernels aot, which records what the new configurations use.")
    return 1 if wrong else 0


def tune(kernel: str, shapes: list[Shape], device: torch.device, out: Path, budget: Budget, command: str) -> list[str]:
    """Searches shape by shape, and writes the table after each. Returns what was wrong."""
    capability = tuning.capability_of(device)
    table = tuning.load_table(kernel, tuning.table_architecture(kernel, capability))
    entries = {_key(kernel, entry.shape): entry for entry in table}
    measured: dict[tuple[int, ...], float] = {}
    wrong = []
    for shape in shapes:
        label = f"{kernel} " + " ".join(f"{key}={shape[key]}" for key in KERNELS[kernel].shape)
        if not budget.allows(label):
            continue
        result = search(kernel, shape, device)
        wrong += result.wrong
        if not result.seconds:
            wrong.append(f"{label}: no configuration works")
            continue
        print(f"{label}: {result.describe()}", flush=True)
        for entry in _new_class(kernel, list(entries.values()), shape):
            entries.setdefault(_key(kernel, entry.shape), entry)
        key = _key(kernel, shape)
        entries[key] = Entry(shape, result.best)
        measured[key] = result.seconds[tuple(result.best.values())]
        _write(kernel, capability, entries, measured, out, _provenance(device, command))
    return wrong


def _new_class(kernel: str, entries: list[Entry], shape: Shape) -> list[Entry]:
    """What shapes with these bounds have used so far, with these bounds: or a new entry would be their only match."""
    bounds = KERNELS[kernel].bounds
    match = nearest(KERNELS[kernel], entries, shape).shape
    same = [entry for entry in entries if all(entry.shape[key] == match[key] for key in bounds)]
    return [Entry({**entry.shape, **{key: shape[key] for key in bounds}}, entry.config) for entry in same]


def _key(kernel: str, shape: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(shape[key] for key in KERNELS[kernel].shape)


def _provenance(device: torch.device, command: str) -> dict[str, Any]:
    measured = {
        "device": device_name(device),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": command,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    note = "measured in this run: entries with microseconds (geometric mean over problems, graph replay, cold buffers)"
    return {"measured": measured, "note": note}


def _write(
    kernel: str,
    capability: int,
    entries: Mapping[tuple[int, ...], Entry],
    measured: Mapping[tuple[int, ...], float],
    out: Path,
    provenance: dict[str, Any],
) -> None:
    keys = KERNELS[kernel]
    rows = []
    for key in sorted(entries):
        entry = entries[key]
        row: dict[str, Any] = {
            "shape": {name: entry.shape[name] for name in keys.shape},
            "config": {name: entry.config[name] for name in keys.config},
        }
        if key in measured:
            row["microseconds"] = round(measured[key] * 1e6, 2)
        rows.append("    " + json.dumps(row))
    head = {"kernel": kernel, "architecture": f"sm_{capability}", "provenance": provenance}
    text = json.dumps(head, indent=2)[:-2] + ',\n  "entries": [\n' + ",\n".join(rows) + "\n  ]\n}\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{kernel}.sm_{capability}.json").write_text(text)
