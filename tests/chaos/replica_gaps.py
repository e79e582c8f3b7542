"""Measures how long clients wait when one of two executors fails or is replaced, on the real model.

    python -m tests.chaos.replica_gaps --repeats 3

As `tests.chaos.gaps`, for a line of single services with two executors of one thread each. They have to end with the
undisturbed text.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uvloop

from pagewire.config import DEFAULT_MODEL
from pagewire.files.models import resolve_model
from tests.chaos.answers import difference
from tests.chaos.gaps import REAL_FLAGS, streams
from tests.e2e.line import Line

EXECUTORS = ("executor", "executor2")
FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "drain": signal.SIGTERM}
SHUTDOWN_TIMEOUT = 0.5  # or streams would end where they are


class TwoExecutors(Line):
    """`signal` and `base_urls` are what `streams` wants."""

    def __init__(self, directory: Path, model: str, hang_timeout: float) -> None:
        hang = ["--hang-timeout", str(hang_timeout)]
        single = [*REAL_FLAGS, "--num-threads", "1", "--shutdown-timeout", str(SHUTDOWN_TIMEOUT), *hang]
        super().__init__(directory, model, executor=single, scheduler=hang, tokenizer=hang, gateway=hang)

    @property
    def base_urls(self) -> list[str]:
        return [self.base_url]

    def arguments(self, service: str) -> list[str]:
        arguments = super().arguments(service.removesuffix("2"))
        addresses = [self.address(name) for name in EXECUTORS]
        if service == "scheduler":
            arguments[arguments.index("--executor-address") + 1] = ",".join(addresses)
        if service == "executor2":
            arguments[arguments.index("--listen") + 1] = addresses[1]
        return arguments

    def signal(self, services: Sequence[str], number: signal.Signals) -> None:
        for service in services:
            self.processes[service].send_signal(number)


async def measure(line: TwoExecutors, names: Sequence[str], repeats: int) -> bool:
    """Prints a line for each fault; whether all texts were those of undisturbed streams."""
    is_right = True
    await line.wait_ready(*EXECUTORS, "gateway")
    await line.wait_executors(2)
    await streams(line, None, "warm")
    silence, expected = await streams(line, None, "undisturbed")
    print(f"undisturbed: {silence:.2f} s", flush=True)
    for name in names:
        gaps = []
        for number in range(repeats):
            victim = EXECUTORS[number % 2]
            gap, answers = await streams(line, (FAULTS[name], [victim]), f"{name} {number}")
            gaps.append(gap)
            for answer, other in zip(answers, expected, strict=True):
                if said := difference(answer.value, other.value):
                    is_right = False
                    print(f"{name}: {said}")
            if name == "drain":
                await asyncio.to_thread(line.processes[victim].wait, 60)
                line.start(victim)
            else:
                line.restart(victim)
            await line.wait_ready(victim)
            await line.wait_executors(2)
        print(f"{name}: {statistics.median(gaps):.2f} s, at most {max(gaps):.2f} s", flush=True)
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(FAULTS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--hang-timeout", type=float, default=8.0)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    args = parser.parse_args()
    names = [args.only] if args.only else list(FAULTS)
    with tempfile.TemporaryDirectory(prefix="pw-", ignore_cleanup_errors=True) as directory:
        line = TwoExecutors(Path(directory), str(resolve_model(args.model)), args.hang_timeout)
        try:
            for service in (*EXECUTORS, "scheduler", "tokenizer", "gateway"):
                line.start(service)
            return int(not uvloop.run(measure(line, names, args.repeats)))
        finally:
            line.stop()


if __name__ == "__main__":
    sys.exit(main())
