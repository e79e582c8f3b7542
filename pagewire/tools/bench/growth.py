"""The loads of a sweep and the resulting curves."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.errors import StartupError
from pagewire.tools.bench import curves
from pagewire.tools.bench.config import SweepFlags

LONGEST_PROMPT = 8192
# Prompts of random words may be a little longer or shorter than requested.
PROMPT_SLACK = 0.01
_TABLE = {
    "output_tok_per_s": "tok/s",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "p99, ms",
    "tpot_p50_ms": "TPOT p50",
    "tpot_p99_ms": "p99, ms",
}


@dataclass(frozen=True)
class Load:
    """A load of num_prompts requests, `concurrency` of them in flight; input_len and output_len in tokens."""

    kind: str
    concurrency: int
    num_prompts: int
    input_len: int
    output_len: int


def loads(config: SweepFlags, max_model_len: int | None) -> list[Load]:
    """Returns the loads. Raises StartupError for requests longer than the model's length (prompt plus output), if it is
    known."""
    made = []
    if config.only != "prompt-length":
        longest = config.input_len + config.output_len
        if max_model_len is not None and longest > max_model_len:
            raise StartupError(
                f"--input-len {config.input_len} and --output-len {config.output_len} make {longest} tokens, but the"
                f" model's length is {max_model_len}"
            )
        made += [
            Load("concurrency", n, max(n, config.num_prompts), config.input_len, config.output_len)
            for n in sorted(set(config.concurrency))
        ]
    if config.only != "concurrency":
        made += [Load("prompt-length", 1, config.num_prompts, n, 1) for n in _prompt_lens(config, max_model_len)]
    return made


def _prompt_lens(config: SweepFlags, max_model_len: int | None) -> list[int]:
    most = LONGEST_PROMPT if max_model_len is None else max(1, int((max_model_len - 1) * (1 - PROMPT_SLACK)))
    if config.prompt_lens is None:
        most = min(most, LONGEST_PROMPT)
        lengths = [128 << n for n in range(16) if 128 << n <= most]
        # The longest, unless it is only slightly longer than the one before.
        return lengths if lengths and most < 1.5 * lengths[-1] else [*lengths, most]
    if max_model_len is not None and max(config.prompt_lens) > most:
        raise StartupError(
            f"--prompt-lens {max(config.prompt_lens)}: the model's length is {max_model_len}, which leaves {most} for"
            " a prompt of random words and one token"
        )
    return sorted(set(config.prompt_lens))


class Growth:
    """Prints every point and then writes the file again, so that an interrupted sweep keeps its points."""

    def __init__(self, config: SweepFlags, model: str, command: str) -> None:
        """command: stored in the curves. Raises StartupError if the file cannot be written."""
        self._path = Path(config.json_out)
        self._label = config.label or model
        self._model = model
        self._command = command
        self._points: dict[str, list[curves.Point]] = {}
        self.failures = 0
        curves.put(self._path)
        print(f"{self._label}\n" + "".join(f"{title:>10}" for title in ("at once", "in", "out", *_TABLE.values())))

    def add(self, load: Load, figures: Mapping[str, Any], errors: Mapping[str, int]) -> None:
        """Adds a point. figures: those of _TABLE, and others. errors: counts; a point with errors is left out of the
        curve."""
        point = {
            "concurrency": load.concurrency,
            "prompt_tokens": load.input_len,
            "output_len": load.output_len,
            "num_requests": load.num_prompts,
        } | dict(figures)
        row = "".join(f"{point[name]:>10}" for name in ("concurrency", "prompt_tokens", "output_len"))
        if errors:
            self.failures += sum(errors.values())
            reasons = "; ".join(f"{count} x {error}" for error, count in errors.items())
            print(f"{row}  left out, requests failed: {reasons}", flush=True)
            return
        print(row + "".join("         -" if v is None else f"{v:>10.1f}" for v in map(point.get, _TABLE)), flush=True)
        points = self._points.setdefault(load.kind, [])
        points.append(point)
        curves.put(self._path, curves.Curve.taken_now(load.kind, self._label, self._model, self._command, points))
