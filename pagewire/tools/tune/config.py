"""The flags of `pagewire tune`: how to measure, and all flags of `pagewire serve`."""

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
        "tokens per second, memory = that of all processes",
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
        "objective that 99 of 100 requests must meet, as ttft=500ms,tpot=50ms; flags that miss it are not used",
        group="tune",
    )
    minutes: float = flag(10.0, "time to spend", group="tune", valid=Range(above=0))
    rounds: int = flag(3, "how often flags and the best so far are measured, in turns", group="tune", valid=POSITIVE)
    out: str = flag("tuned.yaml", "file for `pagewire serve --config`", group="tune")
