"""Runs a server that speaks the OpenAI API, and its load generator, for `python -m benchmarks.peers`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import cycle
from typing import Any

import uvloop

from benchmarks.peers.engines.worker import Times, Unfinished, Work, main
from pagewire.errors import StartupError
from pagewire.flags.ports import available_port
from pagewire.tools.bench import load
from pagewire.tools.bench.config import BenchConfig
from pagewire.tools.bench.request import Record, body, send

SERVED_NAME = "bench"
START_TIMEOUT_S = 600
STOP_TIMEOUT_S = 30
POLL_S = 0.2
# The error of a request that has taken too long.
LATE = "no end within"


class Server:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        """settings: command, with {port} for its port; env, added to the environment; adapters, which requests have
        in turn."""
        port = available_port("127.0.0.1")
        self._url = f"http://127.0.0.1:{port}"
        self._models = settings.get("adapters") or [SERVED_NAME]
        command = [part.replace("{port}", str(port)) for part in settings["command"]]
        # Not in this repository, where folders have the names of others' modules.
        self._folder = tempfile.TemporaryDirectory(prefix="pagewire-peers-")
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, cwd=self._folder.name, env=os.environ | settings["env"]
        )

    def run(self, work: Work) -> list[Times]:
        return uvloop.run(self._run(work))

    async def _run(self, work: Work) -> list[Times]:
        timeout = BenchConfig().timeout if work.limit_s is None else work.limit_s
        config = BenchConfig(base_url=self._url, timeout=timeout, concurrency=work.concurrency, ignore_eos=work.exact)
        named = zip(cycle(self._models), work.prompts)
        bodies = [body(config, model, prompt, work.output_len) for model, prompt in named]
        records = await load.run(config, bodies)
        failed = [record.error for record in records if record.error is not None]
        if work.limit_s is not None and any(error.startswith(LATE) for error in failed):
            raise Unfinished
        if failed:
            raise StartupError(f"{len(failed)} of {len(records)} requests failed: {failed[0]}")
        return [
            Times(record.start, record.start + (record.ttft or 0.0), record.end, record.completion_tokens)
            for record in records
        ]

    def await_ready(self) -> None:
        """Waits for the first answer. Raises StartupError if there will be none."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while (error := uvloop.run(self._ask()).error) is not None:
            if (status := self._process.poll()) is not None:
                raise StartupError(f"the server ended with status {status}")
            if time.monotonic() > deadline:
                raise StartupError(f"the server gave no token within {START_TIMEOUT_S} s: {error}")
            time.sleep(POLL_S)

    async def _ask(self) -> Record:
        config = BenchConfig(base_url=self._url)
        connection = load.connect(config)
        try:
            return await send(connection, config.endpoint, body(config, SERVED_NAME, "one two", 1), config.timeout)
        finally:
            connection.close()

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def run_server() -> int:
    started: list[Server] = []

    def start(settings: Mapping[str, Any]) -> Server:
        started.append(Server(settings))
        started[0].await_ready()
        return started[0]

    try:
        return main(start)
    finally:
        for server in started:
            server.close()


if __name__ == "__main__":
    sys.exit(run_server())
