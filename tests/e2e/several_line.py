"""Two of every service behind one gateway: each scheduler has its own executor, both tokenizers both schedulers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.line import Line
from tests.e2e.replicated_line import ReplicatedLine

SERVICES = ("executor", "executor2", "scheduler", "scheduler2", "tokenizer", "tokenizer2", "gateway")


class SeveralLine(ReplicatedLine):
    """Executors are fake ones."""

    def __init__(self, directory: Path, model: str, *, step_seconds: float) -> None:
        super().__init__(directory, model, step_seconds=step_seconds, gateway=1, tokenizer=3, scheduler=3, executor=1)
        self.timeouts["scheduler2"] = 3

    def address(self, service: str) -> str:
        return Line.address(self, service)

    def kill(self, service: str) -> None:
        self.processes[service].kill()
        self.processes[service].wait()

    def arguments(self, service: str) -> list[str]:
        argv = super().arguments(service)
        kind = argv[0]
        if kind == "scheduler":
            executor = "executor2" if service == "scheduler2" else "executor"
            argv[argv.index("--executor-address") + 1] = self.address(executor)
        elif kind == "tokenizer":
            argv[argv.index("--scheduler-address") + 1] = ",".join(map(self.address, ("scheduler", "scheduler2")))
        elif kind == "gateway":
            argv[argv.index("--tokenizer-address") + 1] = ",".join(map(self.address, ("tokenizer", "tokenizer2")))
        return argv


@contextmanager
def running(directory: Path, model: str, *, step_seconds: float) -> Iterator[SeveralLine]:
    line = SeveralLine(directory, model, step_seconds=step_seconds)
    try:
        for service in SERVICES:
            line.start(service)
        yield line
    finally:
        line.stop()
        line.kill("scheduler2")
