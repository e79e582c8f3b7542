"""The two commands of a first run on a GPU: the parts of each, in the order of their worth."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Every kernel family's cases against the reference, as the tests run them in Triton's interpreter; attention's apart.
FAMILIES = (
    "step_inputs", "elementwise", "split_plan", "bf16", "sampling", "grouped", "scaled_product", "quantize_input",
    "experts", "encoder", "latent", "state_space", "skinny", "adapters",
)  # fmt: skip
ATTENTION = "attention"
# Kernels with tables, captured and replayed.
REPLAYED = (
    "decode_attention", "prefill_attention", "grouped_gemm", "fp8_product", "fp8_weight_only", "int8_product",
    "experts", "skinny_product", "grouped_skinny",
)  # fmt: skip
SMOKE, SMOKE_SECONDS = "smoke", 100.0
_ATTENTION_PARTS, _VARIANT_PARTS = 4, 4
FIRST, SECOND = "first", "second"
# Groups of kernels that one process measures, in this order, with the seconds of each.
GROUP_SECONDS: Mapping[str, Mapping[str, float]] = {
    FIRST: {"decode": 80.0, "prefill": 40.0, "sampling": 40.0},
    SECOND: {"w4": 65.0, "experts": 35.0, "products": 35.0, "elementwise": 15.0},
}


@dataclass(frozen=True)
class Part:
    """A process of its own. arguments: of Python; "{out}" is a directory, "{budget}" the seconds it should end after.

    seconds: its share of a run's time. lacks: why it cannot run here, "" if it can. groups: with the seconds of each,
    they take the place of "{groups}"; those that a crash or a hang leaves are begun again, without the one it was in.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()  # the command that runs Python
    lacks: str = ""
    groups: Mapping[str, float] = field(default_factory=dict)
    needs_stubs: bool = False  # protobuf's, of the services
    ends_within: float = 0.9  # share of its time that it is told: it ends what it has begun by then


@dataclass(frozen=True)
class Command:
    """One run. smoke: side by side, in at most SMOKE_SECONDS; measured: one after the other."""

    seconds: float
    smoke: tuple[Part, ...]
    measured: tuple[Part, ...]


def commands(device: str, small: bool) -> dict[str, Command]:
    """Returns the commands by name: each fits into one call of a machine that is lent for some minutes."""
    common = ("--device", device, *(("--small",) if small else ()), "--out", "{out}", "--budget", "{budget}")

    def kernels(command: str) -> Part:
        groups = GROUP_SECONDS[command]
        arguments = ("-m", "benchmarks.gpu.kernels", "--only", "{groups}", *common)
        return Part("kernels", arguments, sum(groups.values()), groups=groups)

    # Weights of 4 bits come first: of what has not been seen anywhere, they are most.
    models = "llama-3.1-8b-int4,llama-3.1-8b"
    engine = ("-m", "benchmarks.gpu.engine", "--only", "steps", "--models", models, *common)
    tune = ("-m", "benchmarks.kernels", "tune", "--kernel", "decode_attention")
    tuning = (*tune, "--device", device, "--out", "{out}", "--budget", "{budget}")
    return {
        FIRST: Command(
            470.0,
            tuple(smoke_parts(device, small)),
            (Part("engine", engine, 160.0, needs_stubs=True), kernels(FIRST)),
        ),
        # A shape that has been begun is searched to the end.
        SECOND: Command(220.0, (), (kernels(SECOND), Part("tuning", tuning, 60.0, ends_within=0.7))),
    }


def smoke_parts(device: str, small: bool) -> list[Part]:
    """Returns the smoke tests, the slowest first: each may take at most as long as all."""
    interpreted = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    at = ("--device", device)

    def family(name: str, *more: str) -> Part:
        label = " ".join((SMOKE, name, *more[1:]))
        return Part(label, ("-m", f"tests.kernels.triton.{name}", *at, *more), SMOKE_SECONDS, interpreted)

    return [
        *(family(ATTENTION, "--part", f"{part}/{_ATTENTION_PARTS}") for part in range(1, _ATTENTION_PARTS + 1)),
        _sanitized(device),
        *_variants(device, small),
        Part(f"{SMOKE} executor", ("-m", "benchmarks.gpu.smoke", "executor", *at), SMOKE_SECONDS, needs_stubs=True),
        *(
            Part(f"{SMOKE} {name} replayed", ("-m", "benchmarks.gpu.smoke", name, *at), SMOKE_SECONDS, interpreted)
            for name in REPLAYED
        ),
        *(family(name) for name in FAMILIES),
    ]


def _variants(device: str, small: bool) -> list[Part]:
    """Attention with what only some models have, in four parts: they compile some sixty kernels."""
    environment = {"TRITON_INTERPRET": "1", "PAGEWIRE_CPU_KERNELS": "triton"} if device == "cpu" else {}
    command = ("-m", "benchmarks.gpu.kernels", "--only", "variants", "--check", "--device", device)
    command += (*(("--small",) if small else ()), "--out", "{out}", "--budget", "{budget}")
    return [
        Part(f"{SMOKE} variants {part}", (*command, "--part", f"{part}/{_VARIANT_PARTS}"), SMOKE_SECONDS, environment)
        for part in range(1, _VARIANT_PARTS + 1)
    ]


def _sanitized(device: str) -> Part:
    """Every access to memory of one kernel that splits its work, checked."""
    tool = shutil.which("compute-sanitizer") or _existing("/usr/local/cuda/bin/compute-sanitizer")
    lacks = "" if tool and device == "cuda" else f"no compute-sanitizer for device {device}"
    return Part(
        f"{SMOKE} compute-sanitizer",
        ("-m", "benchmarks.gpu.smoke", "decode_attention", "--device", device, "--replays", "0"),
        SMOKE_SECONDS,
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # an allocation for each tensor: what is beyond it is seen
        (tool or "compute-sanitizer", "--error-exitcode", "86", "--launch-timeout", "80"),
        lacks,
    )


def _existing(path: str) -> str | None:
    return path if Path(path).is_file() else None
