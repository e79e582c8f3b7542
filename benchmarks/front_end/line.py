"""Measures what a step costs in the services: `python -m benchmarks.front_end.line [--streams 1,8,32] [--step-ms 4]`.

The real gateway, tokenizer, scheduler and executor services, each in its process, around a model that only sleeps; the
clients stream 256 tokens each, all at the same time. Microseconds of processor time per step, system calls included:
the least of some rounds. "device" is the executor's device thread: the model that sleeps, and the hand-over of results.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from benchmarks.front_end.__main__ import CHAT, NUM_TOKENS, load, process, ready
from pagewire.config.shared import DEFAULT_MODEL
from pagewire.files.models import resolve_model
from pagewire.flags.ports import available_port
from pagewire.wire import health

SERVICES = ("gateway", "tokenizer", "scheduler", "executor")
PARTS = (*SERVICES, "device")
# The kernel's number of a process's clock, with its ended threads: see clock_getcpuclockid(3).
CLOCK_OF_PROCESS = 2
BODY = {**CHAT, "temperature": 0.0, "stream": True, "max_tokens": NUM_TOKENS, "ignore_eos": True}


@contextmanager
def line(step_ms: float) -> Iterator[tuple[dict[str, psutil.Process], int]]:
    """Starts the services; yields their processes and the port of the gateway."""
    port = available_port("127.0.0.1")
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        address = {name: f"unix:{directory}/{name}.sock" for name in SERVICES}
        python = [sys.executable, "-P", "-m"]
        flags: dict[str, dict[str, object]] = {
            "scheduler": {"listen": address["scheduler"], "executor-address": address["executor"]},
            "tokenizer": {
                "listen": address["tokenizer"],
                "scheduler-address": address["scheduler"],
                "model": resolve_model(DEFAULT_MODEL),
                "served-model-name": "m",
            },
            "gateway": {
                "tokenizer-address": address["tokenizer"],
                "host": "127.0.0.1",
                "port": port,
                "data-dir": f"{directory}/data",
            },
        }
        commands = {"executor": ["benchmarks.front_end.executor", address["executor"], str(step_ms)]}
        for name, given in flags.items():
            given["log-level"] = "warning"
            commands[name] = ["pagewire.cli", name, *(f"--{flag}={value}" for flag, value in given.items())]
        processes = {}
        for name, command in commands.items():
            is_ready = (lambda: ready(port)) if name == "gateway" else Path(directory, f"{name}.sock").exists
            processes[name] = stack.enter_context(process([*python, *command], is_ready))
        while health.http_problem(f"http://127.0.0.1:{port}/readyz") is not None:
            pass
        yield processes, port


def seconds(processes: dict[str, psutil.Process]) -> dict[str, float]:
    """Returns the seconds of each part, to the nanosecond, as the kernel's scheduler counts them."""
    total = {name: time.clock_gettime(~one.pid << 3 | CLOCK_OF_PROCESS) for name, one in processes.items()}
    total["device"] = 0.0
    for task in Path(f"/proc/{processes['executor'].pid}/task").iterdir():
        if (task / "comm").read_text() == "device\n":
            total["device"] += int((task / "schedstat").read_text().split()[0]) / 1e9
    total["executor"] -= total["device"]
    return total


def per_step(processes: dict[str, psutil.Process], port: int, num_streams: int) -> dict[str, float]:
    """Returns the microseconds of each part in a step."""
    before = seconds(processes)
    load(port, BODY, num_streams, num_streams)
    return {part: 1e6 * (after - before[part]) / NUM_TOKENS for part, after in seconds(processes).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,8,32", help="requests at the same time")
    parser.add_argument("--rounds", type=int, default=5, help="of each load, of which the least counts")
    parser.add_argument("--step-ms", type=float, default=4.0, help="of the model")
    args = parser.parse_args()
    with line(args.step_ms) as (processes, port):
        load(port, BODY, 1, 1)
        print(f"{'streams':>8}" + "".join(f"{part:>11}" for part in (*PARTS, "services")), flush=True)
        for num_streams in map(int, args.streams.split(",")):
            rounds = [per_step(processes, port, num_streams) for _ in range(args.rounds)]
            least = {part: min(one[part] for one in rounds) for part in PARTS}
            least["services"] = min(sum(one[part] for part in SERVICES) for one in rounds)
            print(f"{num_streams:>8}" + "".join(f"{value:>11.0f}" for value in least.values()), flush=True)


if __name__ == "__main__":
    main()
