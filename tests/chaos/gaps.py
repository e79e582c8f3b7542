"""Measures how long clients of `pagewire serve` wait when something fails: the longest silence in a stream.

    python -m tests.chaos.gaps                       # every fault, three times each
    python -m tests.chaos.gaps --only kill-executor

Clients are four streams, and each fault is inflicted once all of them run. They have to end with the undisturbed text.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx
import psutil
import uvloop

from pagewire.config import DEFAULT_MODEL
from pagewire.files.models import resolve_model
from tests.chaos.answers import difference
from tests.chaos.client import Answer, Client
from tests.chaos.faults.catalogue import Request
from tests.e2e.line import REPOSITORY, free_port

NUM_STREAMS = 4
NUM_FIRST_EVENTS = 20  # that each stream has had before anything happens
BODY = {"max_tokens": 160, "temperature": 0.8, "ignore_eos": True, "stream": True}
REAL_FLAGS = ["--dtype", "float32", "--max-model-len", "2048", "--kv-cache-memory-bytes", "512MiB"]
# name -> (signal, services); "sister" is a second gateway on the same data directory, which clients turn to.
FAULTS: dict[str, tuple[signal.Signals, list[str]]] = {
    **{f"kill-{name}": (signal.SIGKILL, [name]) for name in ("executor", "scheduler", "tokenizer", "gateway")},
    "kill-three": (signal.SIGKILL, ["executor", "scheduler", "tokenizer"]),
    **{f"stop-{name}": (signal.SIGSTOP, [name]) for name in ("executor", "scheduler", "tokenizer", "gateway")},
}


@dataclass
class Silence:
    """The gaps that a client has waited through."""

    longest: float = 0.0  # seconds
    num_events: int = 0
    _last: float = field(default_factory=time.monotonic)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def on_event(self) -> None:
        now = time.monotonic()
        if self.num_events:
            self.longest = max(self.longest, now - self._last)
        self._last = now
        self.num_events += 1
        if self.num_events == NUM_FIRST_EVENTS:
            self.has_begun.set()


class Disturbed(Protocol):
    """The stack that streams are measured over."""

    @property
    def base_urls(self) -> list[str]: ...

    def signal(self, services: Sequence[str], number: signal.Signals) -> None: ...


class Stack:
    """`pagewire serve` and, beside it, a second gateway."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.port, self.sister_port = free_port(), free_port()
        data = ["--data-dir", str(directory / "data")]
        serve = ["serve", str(model), "--port", str(self.port), "--grpc-port", str(free_port()), *data]
        self._commands = [
            [*serve, "--uds-dir", str(directory), "--served-model-name", "m", *REAL_FLAGS],
            [
                "gateway",
                "--port",
                str(self.sister_port),
                "--tokenizer-address",
                f"unix:{directory}/tokenizer.sock",
                *data,
            ],
        ]
        self._log = directory / "log"
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def base_urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in (self.port, self.sister_port)]

    @contextmanager
    def running(self) -> Iterator[Stack]:
        with self._log.open("wb") as log:
            self._processes = [
                subprocess.Popen(
                    [sys.executable, "-m", "pagewire.cli", *command], cwd=REPOSITORY, stdout=log, stderr=log
                )
                for command in self._commands
            ]
        try:
            yield self
        finally:
            for process in self._processes:
                process.terminate()
            for process in self._processes:
                process.wait(60)

    def signal(self, services: Sequence[str], number: signal.Signals) -> None:
        for child in psutil.Process(self._processes[0].pid).children():
            found = re.search(r"\b(gateway|tokenizer|scheduler|executor)\b", " ".join(child.cmdline()[1:6]))
            if found is not None and found[1] in services:
                os.kill(child.pid, number)

    async def wait_ready(self) -> None:
        """Waits for a while, because a process that was just stopped still counts as ready."""
        async with httpx.AsyncClient(timeout=2, trust_env=False) as http, asyncio.timeout(120):
            num_ready = 0
            while num_ready < 10:
                try:
                    answers = [await http.get(f"{base_url}/readyz") for base_url in self.base_urls]
                    num_ready = num_ready + 1 if all(answer.status_code == 200 for answer in answers) else 0
                except httpx.HTTPError:
                    num_ready = 0
                await asyncio.sleep(0.1)


async def streams(
    stack: Disturbed, fault: tuple[signal.Signals, list[str]] | None, name: str
) -> tuple[float, list[Answer]]:
    """The longest silence and what the streams said."""
    silences = [Silence() for _ in range(NUM_STREAMS)]
    is_kept = fault is not None and "gateway" in fault[1]
    async with httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0), trust_env=False) as http:
        clients = [
            Client(
                http,
                stack.base_urls,
                Request("completions", BODY | {"prompt": f"{number} little", "seed": number}),
                key=f"{name} {number}" if is_kept else None,
                patience=2.0 if is_kept else None,
                on_event=silence.on_event,
            )
            for number, silence in enumerate(silences)
        ]
        running = [asyncio.create_task(client.run()) for client in clients]
        await asyncio.gather(*(silence.has_begun.wait() for silence in silences))
        if fault is not None:
            stack.signal(fault[1], fault[0])
        answers = await asyncio.gather(*running)
    return max(silence.longest for silence in silences), answers


async def measure(model: Path, names: Sequence[str], repeats: int) -> bool:
    """Prints a line for each fault; whether all texts were those of undisturbed streams."""
    is_right = True
    with (
        tempfile.TemporaryDirectory(prefix="pw-", ignore_cleanup_errors=True) as name,
        Stack(Path(name), model).running() as stack,
    ):
        await stack.wait_ready()
        await streams(stack, None, "warm")
        silence, expected = await streams(stack, None, "undisturbed")
        print(f"undisturbed: {silence:.2f} s")
        for fault in names:
            gaps = []
            for number in range(repeats):
                gap, answers = await streams(stack, FAULTS[fault], f"{fault} {number}")
                gaps.append(gap)
                for answer, other in zip(answers, expected, strict=True):
                    if said := difference(answer.value, other.value):
                        is_right = False
                        print(f"{fault}: {said}")
                await stack.wait_ready()
                await asyncio.sleep(5)  # a life that was short is restarted later
            print(f"{fault}: {statistics.median(gaps):.2f} s, at most {max(gaps):.2f} s", flush=True)
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(FAULTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    args = parser.parse_args()
    names = [args.only] if args.only else list(FAULTS)
    return int(not uvloop.run(measure(resolve_model(args.model), names, args.repeats)))


if __name__ == "__main__":
    sys.exit(main())
