"""The memory benchmark reads the system's figures of a process, and the stack's metrics."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import numpy as np
import pytest

from benchmarks import memory
from pagewire import flags


@contextmanager
def metrics(text: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_memory_of_a_process_counts_once_it_is_touched() -> None:
    # From the system: what an allocator gives may have been touched by its previous owner.
    pages = mmap.mmap(-1, 64 * memory.MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    before = memory.rollup(os.getpid())
    np.frombuffer(pages, dtype=np.uint8)[:] = 1
    after = memory.rollup(os.getpid())
    for column in ("Pss", "Pss_Anon", "Rss"):
        assert 60 < (after[column] - before[column]) / memory.MIB < 70
    parts = sum(after[column] for column in ("Pss_Anon", "Pss_File", "Pss_Shmem"))
    assert abs(after["Pss"] - parts) <= 4096, "the columns of the table are parts of the first"


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["/venv/bin/python", "-P", "-m", "pagewire.cli", "executor", "--model", "m"], "executor"),
        (["/venv/bin/python3", "/venv/bin/pagewire", "serve", "--port", "1"], "serve"),
    ],
)
def test_processes_go_by_their_command(arguments: list[str], command: str) -> None:
    assert memory.command(arguments) == command


def test_a_process_that_is_not_ours_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"sleep 5.*--pid"):
        memory.command(["sleep", "5"])


def test_gauges_are_found_by_name() -> None:
    text = '# TYPE a gauge\na{service="executor"} 5.0\n# TYPE b gauge\nb{service="executor"} 7e3\n'
    with metrics(text) as url:
        assert memory.gauges(url, ("b", "a")) == [7000.0, 5.0]
        with pytest.raises(SystemExit, match="has no c"):
            memory.gauges(url, ("a", "c"))


def test_the_load_and_the_stack_are_set_by_flags() -> None:
    argv = ["--prompts", "5,6", "--pid", "3", "--streams", "0", "--quantization", "none"]
    config = flags.parse(memory.MemoryConfig, argv, prog="", description="")
    assert (config.prompts, config.pid, config.streams, config.quantization) == ((5, 6), 3, 0, "none")
