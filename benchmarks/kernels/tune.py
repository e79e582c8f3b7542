"""Measure the launch configurations of a kernel and write its tuning table (`pagewire.kernels.tuning`)."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu.report import Budget, device_name
from benchmarks.kernels.forms.compile_forms import compile_ahead
from benchmarks.kernels.search import DeviceLostError, search
from benchmarks.kernels.shapes import Shape, tuned_shapes
from benchmarks.kernels.supervised import DEVICE_LOST, Journal, supervise
from pagewire.kernels import tuning
from pagewire.kernels.tuning import KERNELS, Entry, nearest

COMPILING_SHARE = 0.35  # of the budget, at most, to compile beforehand


# Without a sign of life of the worker. Compiling one form takes seconds, as does its start.
PATIENCE_SECONDS = 90.0


def run(arguments: argparse.Namespace, command: str) -> int:
    """`python -m benchmarks.kernels tune`; the exit code. The work is a worker's, which any configuration may end."""
    started = time.monotonic()
    kernels = arguments.kernel or list(KERNELS)
    with tempfile.TemporaryDirectory() as directory:
        worker = [sys.executable, "-m", "benchmarks.kernels", "tune-worker", "--command", command]
        worker += ["--out", str(arguments.out or tuning.DIRECTORY), "--device", arguments.device]
        worker += ["--shapes", arguments.shapes or ("tiny" if arguments.device == "cpu" else "small")]
        worker += [part for kernel in kernels for part in ("--kernel", kernel)]
        if arguments.device != "cpu":
            compile_ahead(worker, COMPILING_SHARE * arguments.budget)
        path = Path(directory) / "journal"
        left = arguments.budget - (time.monotonic() - started)
        worker += ["--journal", str(path), "--until", str(time.time() + left)]
        # Somewhat longer: a worker that goes on ends by itself, and names what it left out.
        lines = supervise(worker, path, left + 20.0, PATIENCE_SECONDS)
        wrong = bool(lines) or Journal(path).has_failed
    for line in lines:
        print(line)
    print("Then: python -m benchmarks.kernels aot, which records what the new configurations use.")
    return int(wrong)


def work(arguments: argparse.Namespace) -> int:
    """The worker; its exit code. Begun again, it goes on with the shapes that are not done."""
    device, journal = torch.device(arguments.device), Journal(arguments.journal)
    budgets, wrong = [], list[str]()
    try:
        for index, kernel in enumerate(arguments.kernel):
            # No kernel takes the time of those that follow.
            share = (arguments.until - time.time()) / (len(arguments.kernel) - index)
            budgets.append(Budget(share))
            shapes = tuned_shapes(kernel, arguments.shapes, tuning.capability_of(device))
            shapes = [shape for shape in shapes if not journal.is_done(kernel, shape)]
            wrong += tune(kernel, shapes, device, arguments.out, budgets[-1], arguments.asked, journal)
    except DeviceLostError as error:
        print(f"the device is lost: {error}", flush=True)
        os._exit(DEVICE_LOST)  # nothing that is freed now would end well
    for label in itertools.chain.from_iterable(budget.left_out for budget in budgets):
        print(f"left out for lack of time (--budget): {label}")
    for line in wrong:
        print(f"WRONG: {line}")
        journal.failed(line)
    return 1 if wrong else 0


def tune(
    kernel: str,
    shapes: list[Shape],
    device: torch.device,
    out: Path,
    budget: Budget,
    command: str,
    journal: Journal | None = None,
) -> list[str]:
    """Searches shape by shape, and writes the table after each. Returns what was wrong.

    journal: of a run that this continues, with its table in `out`.
    """
    journal = journal or Journal()
    capability = tuning.capability_of(device)
    entries, measured = _begun(kernel, capability, out, journal)
    wrong, longest = [], 0.0
    for shape in shapes:
        label = f"{kernel} " + " ".join(f"{key}={shape[key]}" for key in KERNELS[kernel].shape)
        if not budget.allows(label, longest):
            continue
        started = time.monotonic()
        result = search(kernel, shape, device, journal)
        longest = max(longest, time.monotonic() - started)
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
        journal.done(kernel, shape)
    return wrong


def _begun(
    kernel: str, capability: int, out: Path, journal: Journal
) -> tuple[dict[tuple[int, ...], Entry], dict[tuple[int, ...], float]]:
    """The entries so far, and the seconds of those that this run has measured."""
    if not journal.has_done(kernel):
        table = tuning.load_table(kernel, tuning.table_architecture(kernel, capability))
        return {_key(kernel, entry.shape): entry for entry in table}, {}
    rows = json.loads(tuning.table_path(out, kernel, capability).read_text())["entries"]
    entries = {_key(kernel, row["shape"]): Entry(row["shape"], row["config"]) for row in rows}
    return entries, {_key(kernel, row["shape"]): row["microseconds"] * 1e-6 for row in rows if "microseconds" in row}


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
    path = tuning.table_path(out, kernel, capability)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
