"""Two of each service where there can be two: gateways, tokenizers, executors, around one scheduler."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.line import Line, free_port

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

    def arguments(self, service: str) -> list[str]:
        kind, timeout = _kind(service), str(self.timeouts[service])
        listen = ["--listen", self.address(service)]
        if kind == "executor":
            step = str(self._step_seconds)
            return ["fake-executor", self.address(service), timeout, step]
        rest = {
            "scheduler": [*listen, "--executor-address", f"{self.address('executor')},{self.address('executor2')}"],
            "tokenizer": [
                *listen,
                "--model",
                self.model,
                "--served-model-name",
                "m",
                "--scheduler-address",
                self.address("scheduler"),
            ],
            "gateway": [
                "--port",
                str(self.port if service == "gateway" else self.sister_port),
                "--tokenizer-address",
                f"ipv4:{self.address('tokenizer')},{self.address('tokenizer2')}",
                "--data-dir",
                str(self.directory / "data"),
                "--drain-delay",
                "0.6",
            ],
        }[kind]
        return [kind, *rest, "--shutdown-timeout", timeout]


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
