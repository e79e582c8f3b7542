"""What drafts cost that are refused: `python -m benchmarks.refused_drafts [--methods ngram,self:q2] [FLAGS OF serve]`.

For each method two servers, one without drafts, get the same load in turns: prompts of random words, and outputs drawn
at a high temperature, of which hardly any draft is right (a copy of the model that sees the same noise may be: it has
two bits here). "rate" and "processor" are medians over the rounds of what the server with drafts has and takes, in
output tokens per second and in processor seconds of all its processes, compared with the one without; "least" is the
lowest rate of a round.
"""

import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import psutil

from benchmarks.serving import drive, server
from pagewire import flags
from pagewire.config import ServeConfig
from pagewire.config.fields import POSITIVE, Range, flag
from pagewire.tools.bench.spec import BASELINE, Method


@dataclass(frozen=True, kw_only=True)
class RefusedConfig(ServeConfig):
    """The stack, and the load."""

    methods: str = flag("ngram,suffix,self:q2", "methods that draft, with commas between", group="load")
    draft_tokens: int = flag(5, "most tokens that are drafted at once", group="load", valid=POSITIVE)
    streams: tuple[int, ...] = flag((1, 8, 32), "requests in flight", group="load", valid=POSITIVE)
    rounds: int = flag(6, "how often both servers are measured, in turns", group="load", valid=Range(minimum=2))
    output_len: int = flag(128, "tokens generated for each prompt", group="load", valid=POSITIVE)
    draw_at: float = flag(2.0, "temperature of the outputs", group="load")


@dataclass(frozen=True)
class Server:
    process: psutil.Process
    port: int

    def measure(self, config: RefusedConfig, streams: int) -> tuple[float, float]:
        """Output tokens per second, and processor seconds that they took."""
        before = self._processor_seconds()
        summary = drive(
            f"http://127.0.0.1:{self.port}",
            num_requests=streams,
            concurrency=streams,
            input_len=32,
            output_len=config.output_len,
            temperature=config.draw_at,
        )
        return summary["output_tokens"] / summary["wall_s"], self._processor_seconds() - before

    def _processor_seconds(self) -> float:
        times = [process.cpu_times() for process in (self.process, *self.process.children(recursive=True))]
        return sum(one.user + one.system for one in times)


def main() -> None:
    config = flags.parse(
        RefusedConfig, sys.argv[1:], prog="python -m benchmarks.refused_drafts", description="What refused drafts cost."
    )
    print(f"{'method':>12}{'streams':>10}{'rate':>10}{'least':>10}{'processor':>10}", flush=True)
    for name in config.methods.split(","):
        with ExitStack() as stack:
            quiet = replace(config, log_level="warning")
            methods = (BASELINE, Method(name, config.draft_tokens))
            servers = [Server(*stack.enter_context(server(replace(quiet, **one.flags())))) for one in methods]
            for one in servers:
                one.measure(config, 1)  # the first steps of a size take longer
            for streams in config.streams:
                rates, processor = compare(config, servers, streams)
                cells = statistics.median(rates), min(rates), statistics.median(processor)
                print(f"{name:>12}{streams:>10}" + "".join(f"{cell:>10.3f}" for cell in cells), flush=True)


def compare(config: RefusedConfig, servers: Sequence[Server], streams: int) -> tuple[list[float], list[float]]:
    """By round, rates and processor seconds of the second server, compared with the first one's."""
    rates, processor = list[float](), list[float]()
    for number in range(config.rounds):
        order = servers if number % 2 else servers[::-1]
        measured = {one: one.measure(config, streams) for one in order}
        plain, drafted = (measured[one] for one in servers)
        rates.append(drafted[0] / plain[0])
        processor.append(drafted[1] / plain[1])
    return rates, processor


if __name__ == "__main__":
    main()
