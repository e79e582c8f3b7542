"""Two of each service where there can be two: gateways, tokenizers, executors, around one scheduler."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagewire import cli
from pagewire.process import process
from tests.e2e import fake_executor
from tests.e2e.line import Line, free_port

# Services start in a fraction of the time: each is forked off a process that has imported everything already.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        *("pagewire.gateway.main", "pagewire.services.tokenizer.main", "pagewire.services.scheduler.main"),
        *("tests.e2e.fake_executor", "tests.e2e.replicated_line"),
    ]
)

# In the order of a rolling restart.
SERVICES = ("executor", "executor2", "scheduler", "tokenizer", "tokenizer2", "gateway", "sister")


class ReplicatedLine(Line):
    """Both tokenizers stand in the gateways' address, which take whichever is there; executors are fake ones."""

    def __init__(self, directory: Path, model: str, *, step_seconds: float, **shutdown_timeouts: float) -> None:
        """shutdown_timeouts: by kind of service; `timeouts` has them by service."""
        super().__init__(directory, model)
        self._step_seconds = step_seconds
        self.timeouts = {name: shutdown_timeouts[_kind(name)] for name in SERVICES}
        self._ports = {name: free_port() for name in ("tokenizer", "tokenizer2")}

    def address(self, service: str) -> str:
        if service in self._ports:
            return f"127.0.0.1:{self._ports[service]}"
        return super().address(service)

    def start(self, service: str) -> None:
        forked = _FORKS.Process(target=_run, args=(self._argv(service), self.directory / f"{service}.log"), daemon=True)
        forked.start()
        self.processes[service] = Forked(forked)  # type: ignore[assignment]

    def _argv(self, service: str) -> list[str]:
        kind, timeout = _kind(service), str(self.timeouts[service])
        listen = ["--listen", self.address(service)]
        if kind == "executor":
            step = str(self._step_seconds)
            return ["fake-executor", self.address(service), timeout, step]
        rest = {
            "scheduler": [*listen, "--executor-address", f"{self.address('executor')},{self.address('executor2')}"],
            "tokenizer": [
                *listen,
                *("--model", self.model, "--served-model-name", "m"),
                *("--scheduler-address", self.address("scheduler")),
            ],
            "gateway": [
                *("--port", str(self.port if service == "gateway" else self.sister_port)),
                *("--tokenizer-address", f"ipv4:{self.address('tokenizer')},{self.address('tokenizer2')}"),
                *("--data-dir", str(self.directory / "data"), "--drain-delay", "0.3"),
            ],
        }[kind]
        return [kind, *rest, "--shutdown-timeout", timeout]


class Forked:
    """A process with what a line needs of subprocess.Popen."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        self._process = process
        self.terminate, self.kill = process.terminate, process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode


def _run(argv: list[str], log: Path) -> None:
    """The process of a service."""
    process.die_with(os.getppid())
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if argv[0] == "fake-executor":
        fake_executor.main(argv[1:])
    else:
        cli.main(argv)


def _kind(service: str) -> str:
    return service.removesuffix("2").replace("sister", "gateway")


@contextmanager
def running(
    directory: Path, model: str, *, step_seconds: float, **shutdown_timeouts: float
) -> Iterator[ReplicatedLine]:
    line = ReplicatedLine(directory, model, step_seconds=step_seconds, **shutdown_timeouts)
    try:
        for service in SERVICES:
            line.start(service)
        yield line
    finally:
        line.stop()
