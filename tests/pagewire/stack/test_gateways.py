"""`pagewire gateway --api-server-count 2`, as a container runs it; no tokenizer answers."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pagewire.config import GatewayConfig
from pagewire.flags.ports import available_port
from pagewire.stack.gateways import services

REPOSITORY = Path(__file__).parents[3]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "did not happen within a minute"
        time.sleep(0.05)


class Gateways:
    """The supervising process and what it started."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "log"
        self.port = available_port("127.0.0.1")
        flags = [f"--port={self.port}", "--api-server-count=2", f"--tokenizer-address=unix:{directory}/none.sock"]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pagewire.cli", "gateway", *flags],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def listening(self) -> set[int]:
        """The processes that say they serve."""
        assert self.process.poll() is None, self.log.read_text()
        listening = set()
        for child in self.children():
            with suppress(psutil.NoSuchProcess):  # it ended between the two looks
                if any(c.status == psutil.CONN_LISTEN and c.laddr.port == self.port for c in child.net_connections()):
                    listening.add(child.pid)
        return listening

    def is_alive(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/livez", timeout=10) as response:
            return bool(response.status == 200)


@pytest.fixture
def gateways(tmp_path: Path) -> Iterator[Gateways]:
    gateways = Gateways(tmp_path)
    try:
        wait_until(lambda: len(gateways.listening()) == 2)
        yield gateways
    finally:
        gateways.process.kill()
        gateways.process.wait()


def test_all_serve_one_port_and_end_at_sigterm(gateways: Gateways) -> None:
    children = gateways.children()
    assert all(gateways.is_alive() for _ in range(8))
    os.kill(children[0].pid, signal.SIGKILL)
    wait_until(lambda: len(gateways.listening() - {children[0].pid}) == 2)
    assert gateways.is_alive()
    children += gateways.children()
    gateways.process.terminate()
    assert gateways.process.wait(60) == 0
    assert not any(child.is_running() for child in children)
    assert re.search(
        r"gateway-0 ended \(killed by SIGKILL\)|gateway-1 ended \(killed by SIGKILL\)", gateways.log.read_text()
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel signals it only on Linux; elsewhere a thread polls")
def test_no_orphan_when_the_supervising_process_is_killed(gateways: Gateways) -> None:
    children = gateways.children()
    gateways.process.kill()
    gateways.process.wait()
    wait_until(lambda: not any(child.is_running() for child in children))


def test_a_taken_port_is_refused(gateways: Gateways) -> None:
    command = [sys.executable, "-m", "pagewire.cli", "gateway", f"--port={gateways.port}", "--api-server-count=2"]
    second = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert f"cannot listen on 127.0.0.1:{gateways.port}" in second.stderr and "Traceback" not in second.stderr


def test_each_process_gets_the_whole_configuration() -> None:
    config = GatewayConfig(api_server_count=3, port=9000, api_key="hunter2", tokenizer_address="t:1")
    started = services(config)
    assert [service.name for service in started] == ["gateway-0", "gateway-1", "gateway-2"]
    for service in started:
        assert service.command[-3:] == ["--port=9000", "--reuse-port", "--tokenizer-address=t:1"]
        assert "hunter2" in service.environment.values()
