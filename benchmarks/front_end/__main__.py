"""Measures the gateway's processor time per streamed token and per short request, with a scripted tokenizer service."""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pagewire.flags.ports import available_port
from pagewire.wire import health

NUM_TOKENS = 256
NUM_STREAMS = (1, 32, 128)
STEP_MS = 8
# Tells the peer that a call is wanted (peers/vllm_front_end.py); the tokenizer service here sees the tools.
CALLS_SEED = 7

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "What is paging?"}], "temperature": 1.0}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STREAMED = CHAT | {"stream": True, "max_tokens": NUM_TOKENS}
ASKED: dict[str, dict[str, Any]] = {
    "plain": STREAMED,
    "usage": STREAMED | {"stream_options": {"include_usage": True}},
    "2 logprobs": STREAMED | {"logprobs": True, "top_logprobs": 2},
    "tool call": STREAMED | {"tools": [TOOL], "seed": CALLS_SEED},
}
SHORT = CHAT | {"max_tokens": 4}
PATH = "/v1/chat/completions"


@contextmanager
def process(command: list[str], ready: Callable[[], bool]) -> Iterator[psutil.Process]:
    with subprocess.Popen(command) as started:
        try:
            deadline = time.monotonic() + 300
            while not ready():
                if started.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"did not start: {' '.join(command)}")
                time.sleep(0.1)
            yield psutil.Process(started.pid)
        finally:
            started.send_signal(signal.SIGTERM)


@dataclass(frozen=True)
class FrontEnd:
    """A server to measure: starts it on a port, so many processes of it, with an engine that takes so many milliseconds
    for a token; 0 = all tokens of a request come at once.
    """

    name: str
    start: Callable[[int, int, int], AbstractContextManager[psutil.Process]]


@contextmanager
def pagewire(port: int, num_processes: int, step_ms: int) -> Iterator[psutil.Process]:
    """`pagewire gateway` before a scripted tokenizer service."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        address = f"unix:{directory}/tokenizer.sock"
        python = [sys.executable, "-P", "-m"]
        scripted = [*python, "benchmarks.front_end.tokenizer", address, str(step_ms)]
        stack.enter_context(process(scripted, Path(directory, "tokenizer.sock").exists))
        flags = {
            "tokenizer-address": address,
            "host": "127.0.0.1",
            "port": port,
            "api-server-count": num_processes,
            "data-dir": f"{directory}/data",
            "log-level": "warning",
        }
        command = [*python, "pagewire.cli", "gateway", *(f"--{name}={value}" for name, value in flags.items())]
        yield stack.enter_context(process(command, lambda: ready(port)))


def vllm(python: str, model: str) -> FrontEnd:
    """Starts vLLM's HTTP server with a scripted engine; several processes are several servers, each on its port."""
    script = Path(__file__).parent.parent / "peers" / "vllm_front_end.py"

    @contextmanager
    def start(port: int, num_processes: int, step_ms: int) -> Iterator[psutil.Process]:
        flags = ["--host=127.0.0.1", f"--port={port}", "--served-model-name=m", "--max-model-len=4096"]
        flags += ["--load-format=dummy", "--enable-auto-tool-choice", "--tool-call-parser=hermes"]
        flags += ["--disable-uvicorn-access-log", "--disable-log-stats", "--uvicorn-log-level=warning"]
        with process([python, str(script), str(step_ms), model, *flags], lambda: ready(port)) as server:
            yield server

    return FrontEnd("vLLM", start)


def ready(port: int) -> bool:
    return health.http_problem(f"http://127.0.0.1:{port}/health") is None


def processor_seconds(root: psutil.Process) -> float:
    """Returns the seconds of a process and its children, to the nanosecond, as the kernel's scheduler counts them."""
    total = 0
    for one in (root, *root.children(recursive=True)):
        for task in Path(f"/proc/{one.pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def load(port: int, body: dict[str, Any], num_connections: int, num_requests: int) -> dict[str, float]:
    command = [sys.executable, "-P", "-m", "benchmarks.front_end.load", str(port), PATH, json.dumps(body)]
    output = subprocess.run(
        [*command, str(num_connections), str(num_requests)], check=True, stdout=subprocess.PIPE
    ).stdout
    result: dict[str, float] = json.loads(output)
    return result


def tokens(server: psutil.Process, port: int, body: dict[str, Any], num_streams: int, rounds: int) -> float:
    """Microseconds per token; the least of some rounds."""
    times = []
    for _ in range(rounds):
        before = processor_seconds(server)
        result = load(port, body, num_streams, num_streams)
        times.append(1e6 * (processor_seconds(server) - before) / (num_streams * NUM_TOKENS))
        if result["events"] < num_streams * NUM_TOKENS:
            raise SystemExit(f"{result['events']:.0f} events for {num_streams * NUM_TOKENS} tokens")
    return min(times)


def requests(server: psutil.Process, port: int, num_requests: int, num_connections: int) -> tuple[float, float]:
    """Returns (requests per second, microseconds of processor time per request)."""
    before = processor_seconds(server)
    result = load(port, SHORT, num_connections, num_requests)
    return num_requests / result["wall"], 1e6 * (processor_seconds(server) - before) / num_requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each load, of which the best counts")
    parser.add_argument("--requests", type=int, default=4000, help="short ones")
    parser.add_argument("--connections", type=int, default=64, help="that send the short requests")
    peer = "vLLM's front end as well: its Python, and a directory with config.json and a tokenizer"
    parser.add_argument("--vllm", nargs=2, metavar=("PYTHON", "MODEL"), help=peer)
    args = parser.parse_args()
    front_ends = [FrontEnd("Pagewire", pagewire)] + ([vllm(*args.vllm)] if args.vllm else [])
    port = available_port("127.0.0.1")
    print(f"{'µs per token':<22}" + "".join(f"{f'{n} streams':>13}" for n in NUM_STREAMS))
    for front_end in front_ends:
        with front_end.start(port, 1, STEP_MS) as server:
            load(port, STREAMED, 1, 1)
            for name, body in ASKED.items():
                times = [tokens(server, port, body, num_streams, args.rounds) for num_streams in NUM_STREAMS]
                print(f"{front_end.name:<10}{name:<12}" + "".join(f"{value:>13.1f}" for value in times), flush=True)
    for front_end in front_ends:
        for num_processes in (1, 2) if front_end.name == "Pagewire" else (1,):
            with front_end.start(port, num_processes, 0) as server:
                load(port, SHORT, args.connections, args.connections)
                rate, each = max(requests(server, port, args.requests, args.connections) for _ in range(args.rounds))
                print(
                    f"{front_end.name}, {num_processes} processes: {rate:.0f} short requests/s, {each:.0f} µs",
                    flush=True,
                )


if __name__ == "__main__":
    main()
