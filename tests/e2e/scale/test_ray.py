"""`pagewire serve` with its executor on a Ray of this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.line import REPOSITORY, free_port

pytest.importorskip("ray", reason="Ray is not installed: pip install 'pagewire[ray]'")
pytestmark = pytest.mark.slow


def stream(port: int, on_part: Callable[[int], None]) -> str:
    body = {"model": "m", "prompt": "Once upon a time", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    text, count = "", 0
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=240) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                on_part(count := count + 1)
    return text


def actor_of(serve: subprocess.Popen[bytes]) -> psutil.Process:
    """The actor's process, the parent of the executor. A Ray that is started for the stack is below it."""
    for process in psutil.Process(serve.pid).children(recursive=True):
        if "executor" in process.cmdline() and (parent := process.parent()) is not None:
            return parent
    raise AssertionError("there is no executor")


def test_a_stream_goes_on_when_its_actor_is_killed_and_nothing_is_left_at_the_end(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    port, log = free_port(), tmp_path / "serve.log"
    command = [sys.executable, "-m", "pagewire.cli", "serve", str(smollm2_gguf), "--served-model-name", "m"]
    command += ["--port", str(port), "--grpc-port", str(free_port()), "--dtype", "float32"]
    command += ["--distributed-executor-backend", "ray", "--ray-address", "local"]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}  # else it writes a token to the home directory
    with log.open("wb") as out:
        serve = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 180
        while "Ctrl-C stops it" not in log.read_text():
            assert serve.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
            time.sleep(0.2)
        undisturbed = stream(port, lambda count: None)

        def kill(count: int) -> None:
            if count == 10:
                actor_of(serve).send_signal(signal.SIGKILL)

        assert stream(port, kill) == undisturbed, log.read_text()[-5000:]
        processes = psutil.Process(serve.pid).children(recursive=True)
        serve.send_signal(signal.SIGTERM)
        assert serve.wait(60) == 0
        _, left = psutil.wait_procs(processes, timeout=30)
        assert not left
    finally:
        serve.kill()
        serve.wait()
