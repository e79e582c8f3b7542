"""The flags of `pagewire tune`: how to measure, and everything that `pagewire serve` takes."""

from dataclasses import dataclass

from pagewire.config import ServeConfig
from pagewire.config.fields import POSITIVE, Range, flag

GOALS = ("ttft", "tpot", "throughput", "memory")


@dataclass(frozen=True, kw_only=True)
class TuneConfig(ServeConfig):
    """`pagewire tune`."""

    goal: str = flag(
        "throughput",
        "what to improve: ttft = time to the first token, tpot = time per output token after it, throughput = output "
        "tokens per second, memory = what all processes keep",
        group="tune",
        choices=GOALS,
    )
    trace: str | None = flag(
        None,
        'requests to measure with, a file of JSON lines {"prompt": "...", "max_tokens": N, "at": SECONDS}; at, the '
        "time since the first, may be missing: then --concurrency are in flight (default: prompts of 100 to 800 words, "
        "half of them behind the same system prompt)",
        group="tune",
    )
    concurrency: int = flag(8, "requests in flight, of a trace without times", group="tune", valid=POSITIVE)
    slo: str | None = flag(
        None,
        "what 99 of 100 requests must keep, as ttft=500ms,tpot=50ms; flags that break it are not taken",
        group="tune",
    )
    minutes: float = flag(10.0, "time to spend", group="tune", valid=Range(above=0))
    rounds: int = flag(
        3, "how often flags and what they are compared with are measured, in turns", group="tune", valid=POSITIVE
    )
    out: str = flag("tuned.yaml", "file for `pagewire serve --config`", group="tune")
