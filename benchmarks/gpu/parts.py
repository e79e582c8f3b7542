"""The parts of a first run on a GPU, the most valuable first."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

# Every kernel family's cases against the reference, as the tests run them in Triton's interpreter.
FAMILIES = (
    "step_inputs", "elementwise", "split_plan", "attention", "bf16", "sampling", "grouped", "scaled_product",
    "quantize_input", "experts", "encoder", "latent", "state_space", "skinny",
)  # fmt: skip
# Kernels with tables, captured and replayed.
REPLAYED = (
    "decode_attention", "prefill_attention", "grouped_gemm", "grouped_gemv", "fp8_product", "fp8_weight_only",
    "int8_product", "experts", "skinny_product", "grouped_skinny",
)  # fmt: skip
SMOKE = "smoke"
SMOKE_SECONDS = 180.0
_VARIANT_PARTS = 4


@dataclass(frozen=True)
class Part:
    """A process of its own. arguments: of Python; "{out}" is a directory, "{budget}" the seconds it should end after.

    seconds: its share of a run's time. lacks: why it cannot run here, "" if it can.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()  # the command that runs Python
    lacks: str = ""


def smoke_parts(device: str, small: bool) -> list[Part]:
    """Side by side: each at most as long as all may take."""
    interpreted = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    at = ("--device", device)
    parts = [
        Part(f"{SMOKE} executor", ("-m", "benchmarks.gpu.smoke", "executor", *at), SMOKE_SECONDS),
        *(
            Part(f"{SMOKE} {name} replayed", ("-m", "benchmarks.gpu.smoke", name, *at), SMOKE_SECONDS, interpreted)
            for name in REPLAYED
        ),
        *(
            Part(f"{SMOKE} {name}", ("-m", f"tests.kernels.triton.{name}", *at), SMOKE_SECONDS, interpreted)
            for name in FAMILIES
        ),
    ]
    return [_sanitized(device), *_variants(device, small), *parts]  # the slowest first


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
        (tool or "compute-sanitizer", "--error-exitcode", "86", "--launch-timeout", "120"),
        lacks,
    )


def _existing(path: str) -> str | None:
    return path if Path(path).is_file() else None


def measured_parts(device: str, small: bool, model: str | None) -> list[Part]:
    """One after the other. model: a real checkpoint for the engine."""
    common = ("--device", device, *(("--small",) if small else ()), "--out", "{out}", "--budget", "{budget}")

    def kernels(*groups: str) -> tuple[str, ...]:
        return ("-m", "benchmarks.gpu.kernels", "--only", ",".join(groups), *common)

    engine = ("-m", "benchmarks.gpu.engine", "--only", "steps", "--models", "llama-3.1-8b,llama-3.1-8b-int4", *common)
    real = Part(
        "real model",
        ("-m", "benchmarks.gpu.engine.real", "--model", model or "", *common),
        40,
        lacks="" if model else "no --model: python -m benchmarks.gpu.engine.real_checkpoint makes one to carry along",
    )
    return [
        Part("decode", kernels("decode"), 90),
        Part("prefill", kernels("prefill"), 50),
        Part("few rows", kernels("products"), 20),
        Part("experts", kernels("experts"), 50),
        Part("products", ("-m", "benchmarks.gpu.quantized", *common), 80),
        real,
        Part("engine", engine, 110),
        Part("loads", ("-m", "benchmarks.gpu.engine.loads", *common), 40),
        Part("elementwise", kernels("elementwise", "step", "sampling"), 30),
    ]
