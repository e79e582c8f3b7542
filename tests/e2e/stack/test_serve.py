"""`pagewire serve`, as a newcomer uses it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.line import NO_CERTIFICATES, REPOSITORY, free_port


@contextmanager
def running_stack(model: Path, directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """Runs `pagewire serve`; yields its process, its port and its log."""
    port, log = free_port(), directory / "serve.log"
    command = [sys.executable, "-m", "pagewire.cli", "serve", str(model)]
    command += ["--port", str(port), "--grpc-port", str(free_port()), "--served-model-name", "m"]
    command += ["--max-num-seqs", "8", "--max-num-batched-tokens", "128"]  # few sizes of steps to be recorded
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 120
        while not is_ready(port):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield process, port, log
    finally:
        process.kill()
        process.wait()


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5, verify=NO_CERTIFICATES).status_code == 200
    except httpx.HTTPError:
        return False


def services_of(process: subprocess.Popen[bytes]) -> dict[str, psutil.Process]:
    pattern = re.compile(r"\b(gateway|tokenizer|scheduler|executor)\b")
    children = psutil.Process(process.pid).children()
    named = ((pattern.search(" ".join(child.cmdline()[1:5])), child) for child in children)
    return {match.group(1): child for match, child in named if match}


def listening(process: subprocess.Popen[bytes]) -> list[tuple[str, int]]:
    """Returns (address, port) of every TCP socket that listens in the stack's processes."""
    stack = psutil.Process(process.pid)
    found = [c for one in (stack, *stack.children(recursive=True)) for c in one.net_connections("inet")]
    # gRPC listens on IPv4 by way of IPv6.
    return [(c.laddr.ip.removeprefix("::ffff:"), c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN]


def complete(port: int) -> str:
    body = {"model": "m", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    response = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60, verify=NO_CERTIFICATES)
    return str(response.raise_for_status().json()["choices"][0]["text"])


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=20)
    return not alive


def test_serves_restarts_what_dies_and_stops_cleanly(smollm2_gguf: Path, tmp_path: Path) -> None:
    with running_stack(smollm2_gguf, tmp_path) as (process, port, log):
        assert "Paris" in complete(port)
        sockets = listening(process)
        assert len(sockets) == 2 and ("127.0.0.1", port) in sockets, "REST and the public gRPC"
        assert {address for address, _ in sockets} == {"127.0.0.1"}
        services = services_of(process)
        assert set(services) == {"gateway", "tokenizer", "scheduler", "executor"}
        services["executor"].kill()
        assert "Paris" in complete(port), "the request waits for the executor's successor"
        restarted = services_of(process)
        assert restarted["executor"].pid != services["executor"].pid
        assert restarted["scheduler"].pid == services["scheduler"].pid
        body = {"model": "m", "prompt": "Count:", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        url = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60, verify=NO_CERTIFICATES) as streamed:
            lines = filter(None, streamed.iter_lines())
            assert "text" in next(lines)
            process.send_signal(signal.SIGINT)
            *_, last, done = lines
        assert "shutting down" in last and done == "data: [DONE]", "Ctrl-C waits for no client, and says so"
        assert process.wait(30) == 0
        assert gone(list(restarted.values()))
        banner = log.read_text()
        assert f"http://127.0.0.1:{port}" in banner and "curl" in banner


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a child that its parent died")
def test_no_orphan_when_the_stack_itself_is_killed(quick_model: Path, tmp_path: Path) -> None:
    with running_stack(quick_model, tmp_path) as (process, _, _):
        services = list(services_of(process).values())
        assert len(services) == 4
        os.kill(process.pid, signal.SIGKILL)
        assert gone(services)
