"""Files of curves, which `pagewire bench sweep` and the scripts under benchmarks/ write and `pagewire bench plot`
draws.

{"curves": [{"kind": "concurrency", "label": "Pagewire bf16", "model": "m", "time": "2026-11-21T22:00:00Z",
             "machine": "AMD EPYC 9555, 2 CPUs", "command": "pagewire bench sweep ...",
             "points": [{"concurrency": 1, "output_tok_per_s": 83.1, ...}, ...]}]}

A point has the x and at least one quantity of its kind (KINDS), and other measured values. A file has one curve for
each kind and label.
"""

import dataclasses
import json
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.errors import StartupError
from pagewire.process.process import usable_cores

Point = dict[str, Any]


@dataclass(frozen=True)
class Quantity:
    """One vertical axis. log: whether its values span decades. target: the goal, in the same unit."""

    name: str
    title: str
    log: bool = True
    target: float | None = None


@dataclass(frozen=True)
class Kind:
    x: str
    x_title: str
    quantities: tuple[Quantity, ...]


KINDS = {
    "concurrency": Kind(
        "concurrency",
        "requests in flight",
        (
            Quantity("output_tok_per_s", "output tokens per second", log=False),
            Quantity("ttft_p50_ms", "time to first token, median, ms"),
            Quantity("tpot_p50_ms", "time per output token, median, ms"),
        ),
    ),
    "prompt-length": Kind(
        "prompt_tokens", "prompt, tokens", (Quantity("ttft_p50_ms", "time to first token, median, ms"),)
    ),
    "context-length": Kind("context_tokens", "context of each request, tokens", (Quantity("step_ms", "step, ms"),)),
    "running-requests": Kind(
        "running_requests",
        "running requests",
        (Quantity("us_per_request", "scheduler's CPU time per request, µs", log=False, target=4.0),),
    ),
    "speculation": Kind(
        "draft_tokens",
        "maximum number of tokens drafted at once",
        (
            Quantity("ratio", "output tokens per second, relative to no drafts", log=False),
            Quantity("output_tok_per_s", "output tokens per second", log=False),
            Quantity("tokens_per_step", "tokens per step of a request", log=False),
        ),
    ),
    "model-size": Kind("parameters", "parameters", (Quantity("start_s", "start to first token, s", log=False),)),
}


@dataclass(frozen=True)
class Curve:
    """A curve. label: its name in the legend. command: the command that measures it again, without secrets."""

    kind: str
    label: str
    model: str
    time: str
    machine: str
    command: str
    points: Sequence[Point]

    @classmethod
    def taken_now(cls, kind: str, label: str, model: str, command: str, points: Sequence[Point]) -> "Curve":
        return cls(kind, label, model, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), machine(), command, points)


def machine() -> str:
    """Returns the processor's name, and how many processors this process may use."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {usable_cores()} CPUs"


def read(path: Path) -> list[Curve]:
    """Reads a file of curves. Raises StartupError for any other file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("curves"), list):
        raise StartupError(
            f'{path}: not a file of curves {{"curves": [...]}}, such as `pagewire bench sweep` writes (the results of'
            " `pagewire bench serve` are single points)"
        )
    return [_curve(path, value) for value in content["curves"]]


def put(path: Path, *curves: Curve) -> None:
    """Writes curves to the file. They replace curves with the same kind and label; the others are kept.

    Without curves, only checks that the file can be written. Raises StartupError.
    """
    there = read(path) if path.exists() else []
    taken = {(curve.kind, curve.label) for curve in curves}
    kept = [curve for curve in there if (curve.kind, curve.label) not in taken]
    content = {"curves": [dataclasses.asdict(curve) for curve in (*kept, *curves)]}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        if curves:
            temporary.replace(path)
        else:
            temporary.unlink()
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error}; name another file with --json-out") from error


def _curve(path: Path, value: Any) -> Curve:
    names = [field.name for field in dataclasses.fields(Curve)]
    if not isinstance(value, dict) or set(value) != set(names):
        raise StartupError(f"{path}: a curve has {', '.join(names)}, and this one does not: {str(value)[:80]}")
    if not all(isinstance(value[name], str) for name in names if name != "points"):
        raise StartupError(f"{path}: {', '.join(names[:-1])} of a curve are text: {str(value)[:80]}")
    if value["kind"] not in KINDS:
        raise StartupError(f"{path}: unknown kind of curve {value['kind']!r}; known kinds: {', '.join(KINDS)}")
    if not isinstance(value["points"], list) or not value["points"]:
        raise StartupError(f"{path}: the {value['kind']} curve {value['label']!r} has no points")
    for point in value["points"]:
        _check_point(f"{path}: {value['label']}", KINDS[value["kind"]], point)
    return Curve(**value)


def _check_point(source: str, kind: Kind, point: Any) -> None:
    if not isinstance(point, dict) or not _is_number(point.get(kind.x)) or point[kind.x] <= 0:
        raise StartupError(f"{source}: a point has no number {kind.x!r} above 0: {str(point)[:80]}")
    names = [quantity.name for quantity in kind.quantities]
    given = [point[name] for name in names if point.get(name) is not None]
    if not given or not all(map(_is_number, given)):
        raise StartupError(f"{source}: a point has no numbers as {', '.join(names)}: {str(point)[:80]}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
