"""A line with two executors: one computes prompts, the other decodes."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.line import Line

SERVICES = ("executor", "executor2", "scheduler", "tokenizer", "gateway")
ROLES = {"executor": "prefill", "executor2": "decode"}


class RoleLine(Line):
    """The executors have the same flags, except for the role."""

    def arguments(self, service: str) -> list[str]:
        if service in ROLES:
            flags = self.flags.get("executor", [])
            listen = ["--listen", self.address(service), "--role", ROLES[service]]
            return ["executor", *listen, "--model", self.model, *flags]
        argv = super().arguments(service)
        if service == "scheduler":
            argv[argv.index("--executor-address") + 1] = ",".join(map(self.address, ROLES))
        return argv


@contextmanager
def running(directory: Path, model: str, **flags: list[str]) -> Iterator[RoleLine]:
    line = RoleLine(directory, model, **flags)
    try:
        for service in SERVICES:
            line.start(service)
        asyncio.run(line.wait_ready())
        asyncio.run(line.wait_executors(2))
        yield line
    finally:
        line.stop()
