"""What `--profile` gains and costs: `python -m benchmarks.profiles [--rounds 3] [--small] [--vary FLAG=VALUE ...]`.

A server without a profile and one for each, in turns, under two loads: people (few streams, prompts that are long
beside them) and a batch (all at once). Ratios to the server without are medians of the ratios of each round, so that
they hold on a machine that is not quiet. --vary measures single flags in place of profiles.
"""

import argparse
import statistics
from collections import defaultdict
from typing import Any

import psutil

from benchmarks.serving import drive, server
from pagewire import flags
from pagewire.config import SET_BY_STACK, ServeConfig

PROFILES = ("latency", "throughput", "cost")
# (name, requests, at once, prompt, output): of each load, and of a short run.
LOADS = (("people", 24, 4, 512, 64), ("batch", 192, 192, 128, 64))
SMALL = (("people", 6, 3, 512, 16), ("batch", 48, 48, 128, 16))
# Of the summary of `pagewire bench serve`.
SHOWN = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "itl_p99_ms", "output_tok_per_s")


def config_of(*argv: str) -> ServeConfig:
    return flags.parse(
        ServeConfig,
        [*argv, "--max-queue-time=0", "--log-level=warning"],
        prog="profiles",
        description="",
        without=SET_BY_STACK,
        environ={},
    )


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """What they have computed: on a machine that is not quiet it tells more of throughput than time does."""
    return sum(sum(each.cpu_times()[:2]) for each in processes)


def measured(config: ServeConfig, loads: Any) -> dict[tuple[str, str], float]:
    """By load and quantity."""
    found: dict[tuple[str, str], float] = {}
    with server(config) as (process, port):
        everything = [process, *process.children(recursive=True)]
        for name, requests, concurrency, input_len, output_len in loads:
            before = cpu_seconds(everything)
            summary = drive(
                f"http://127.0.0.1:{port}",
                num_requests=requests,
                concurrency=concurrency,
                input_len=input_len,
                output_len=output_len,
            )
            found |= {(name, key): summary[key] for key in SHOWN}
            found[name, "processor_s"] = cpu_seconds(everything) - before
        found["all", "resident_mib"] = sum(each.memory_info().rss for each in everything) / 2**20
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="shorter loads")
    parser.add_argument("--vary", nargs="+", default=[], metavar="FLAG=VALUE", help="flags, instead of profiles")
    args = parser.parse_args()
    contestants = [f"--{flag}" for flag in args.vary] or [f"--profile={name}" for name in PROFILES]
    ratios: dict[tuple[str, tuple[str, str]], list[float]] = defaultdict(list)
    absolute: dict[tuple[str, str], list[float]] = defaultdict(list)
    loads = SMALL if args.small else LOADS
    for _ in range(args.rounds):
        plain = measured(config_of(), loads)
        for quantity, value in plain.items():
            absolute[quantity].append(value)
        for contestant in contestants:
            for quantity, value in measured(config_of(contestant), loads).items():
                ratios[contestant, quantity].append(value / plain[quantity])
    width = max(map(len, contestants))
    print(f"{'load':7} {'':24} {'defaults':>9}  " + "  ".join(f"{name:>{width}}" for name in contestants))
    for quantity in absolute:
        cells = [f"{statistics.median(ratios[name, quantity]):.2f} x".rjust(width) for name in contestants]
        print(f"{quantity[0]:7} {quantity[1]:24} {statistics.median(absolute[quantity]):9.1f}  " + "  ".join(cells))


if __name__ == "__main__":
    main()
