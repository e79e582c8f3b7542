"""Starts a stack as users do, and loads it through HTTP from a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from pagewire import flags
from pagewire.config import ServeConfig
from pagewire.flags.ports import available_port
from pagewire.wire import health

START_TIMEOUT_S = 600


@contextmanager
def server(config: ServeConfig, grpc_port: int | None = None) -> Iterator[tuple[psutil.Process, int]]:
    """`pagewire serve` of this configuration, ready, on free ports of this machine; the process and its REST port."""
    port = available_port("127.0.0.1")
    grpc_port = available_port("127.0.0.1") if grpc_port is None else grpc_port
    command = [sys.executable, "-P", "-m", "pagewire.cli", "serve"]
    with tempfile.TemporaryDirectory() as data:
        serve = config.part(ServeConfig, host="127.0.0.1", port=port, grpc_port=grpc_port, data_dir=data)
        process = subprocess.Popen([*command, *flags.to_argv(serve)])
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while health.http_problem(f"http://127.0.0.1:{port}/readyz") is not None:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the server did not start; its log above tells why")
                time.sleep(0.1)
            yield psutil.Process(process.pid), port
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def drive(
    url: str, *, num_requests: int, concurrency: int, input_len: int, output_len: int, temperature: float = 0.0
) -> dict[str, Any]:
    """The summary of `pagewire bench serve`, with prompts that no prefix cache knows. Exits if a request failed."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "result.json")
        arguments = {
            "base-url": url,
            "num-prompts": num_requests,
            "concurrency": concurrency,
            "warmup": 0,
            "seed": time.time_ns() % 2**31,
            "input-len": input_len,
            "output-len": output_len,
            "temperature": temperature,
            "json-out": result,
        }
        argv = [f"--{name}={value}" for name, value in arguments.items()]
        command = [sys.executable, "-P", "-m", "pagewire.cli", "bench", "serve", *argv]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary: dict[str, Any] = json.loads(result.read_text())["summary"]
    if summary["failures"]:
        raise SystemExit(f"{summary['failures']} requests failed: {summary}")
    return summary
