"""Dashboards and alerts against a real Prometheus and a real line: python -m tests.observability.live (seven minutes)

Faults are made one after the other, while requests go on. At the end each query of each panel must have found data,
each alert must have fired, and none may still. Durations of the rules are cut to a twentieth.
"""

import argparse
import asyncio
import contextlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import yaml

from deploy.observability import rules
from deploy.observability.dashboards import dashboards
from pagewire.config import DEFAULT_MODEL
from pagewire.files.models import resolve_model
from tests.e2e.line import REPOSITORY, Line, free_port

# Five milliseconds per token are too few for the model: an objective that is missed.
GOAL = rules.Objectives(tpot_s=0.005)
_SHORTER = 20
_POISON = 49000
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_FLAGS = {
    "executor": [
        "--max-model-len",
        "2048",
        "--num-gpu-blocks-override",
        "72",
        "--hang-timeout",
        "0",
        "--fault-injection",
        f"{_POISON}:raise,{_POISON + 1}:nan",
        "--spec-method",
        "ngram",
    ],
    # Steps that are long enough for the next decision to be held back: late ones are those that were.
    "scheduler": [
        "--max-num-seqs",
        "8",
        "--max-num-batched-tokens",
        "512",
        "--target-itl-ms",
        "0",
        "--max-waiting-requests",
        "24",
        "--max-queue-time",
        "0",
        "--hang-timeout",
        "0",
    ],
    "tokenizer": ["--tokenizer-pool-size", "1", "--tokenizer-pool-type", "process"],
}


STEPS = (
    "in_order",
    "prefixes",
    "poison",
    "flood",
    "deadlines",
    "busy_tokenizer",
    "paused_scheduler",
    "stopped_executor",
    "lost_executor",
    "lost_tokenizer",
    "connections",
    "lost_gateway",
)


class FewConnections(Line):
    """A line with room for a few hundred connections only."""

    def start(self, service: str) -> None:
        if service != "gateway":
            super().start(service)
            return
        command = ["prlimit", "--nofile=600:600", sys.executable, "-m", "pagewire.cli", *self.arguments(service)]
        with (self.directory / f"{service}.log").open("ab") as log:
            self.processes[service] = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)


def shortened(text: str) -> str:
    """Returns rules with windows and holds a twentieth as long."""

    def shorter(match: re.Match[str]) -> str:
        return f"{int(match[2]) * _SECONDS[match[3]] * 1000 // _SHORTER}ms".join((match[1], match[4]))

    return re.sub(r"(\[|for: )(\d+)([smh])(\]|$)", shorter, text, flags=re.MULTILINE)


class Prometheus:
    def __init__(self, directory: Path, target: int) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._http = httpx.AsyncClient(base_url=self.url, timeout=30)
        (directory / "rules.yml").write_text(shortened(rules.text(GOAL, "docs/runbook.md")))
        scrape = {"job_name": "pagewire", "honor_labels": True}
        configuration = {
            "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "500ms"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [scrape | {"static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        command = ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/tsdb"]
        command += [f"--web.listen-address={self.url.removeprefix('http://')}", "--query.lookback-delta=6s"]
        with (directory / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self.since = time.time()

    async def firing(self) -> set[str]:
        data = (await self._http.get("/api/v1/alerts")).json()["data"]
        return {one["labels"]["alertname"] for one in data["alerts"] if one["state"] == "firing"}

    async def ever_fired(self) -> set[str]:
        found = await self.range('count by (alertname) (ALERTS{alertstate="firing"})')
        return {series["metric"]["alertname"] for series in found}

    async def range(self, query: str) -> list[dict]:
        params: dict[str, str | float] = {"query": query, "start": self.since, "end": time.time(), "step": 1}
        answer = (await self._http.get("/api/v1/query_range", params=params)).json()
        assert answer["status"] == "success", f"{query}: {answer}"
        return answer["data"]["result"]

    async def panels_without_data(self) -> list[str]:
        missing = []
        for board in dashboards(GOAL):
            for panel in board.panels():
                for query in panel.expressions():
                    query = query.replace("$model", ".*").replace("$__rate_interval", "5s")
                    found = await self.range(query)
                    if not any(value != "NaN" for series in found for _, value in series["values"]):
                        missing.append(f"{board.title} / {panel.title}: {query}")
        return missing


class Drill:
    def __init__(self, line: Line, prometheus: Prometheus) -> None:
        self.line, self.prometheus = line, prometheus
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=line.base_url, timeout=120, limits=limits)

    async def complete(self, prompt: object, max_tokens: int = 24, timeout_s: float = 60) -> None:
        """One request, whatever becomes of it."""
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        with contextlib.suppress(httpx.HTTPError):
            await self.http.post("/v1/completions", json=body, headers={"X-Request-Timeout": str(timeout_s)})

    @contextlib.asynccontextmanager
    async def load(
        self, clients: int, words: int = 20, max_tokens: int = 24, timeout_s: float = 60
    ) -> AsyncIterator[None]:
        """Requests of so many clients, one after the other, until the block is left."""

        async def client() -> None:
            while True:
                text = " ".join(str(random.random()) for _ in range(words // 10 + 1))
                await self.complete(text, max_tokens, timeout_s)
                await asyncio.sleep(0.05)

        tasks = [asyncio.create_task(client()) for _ in range(clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def fires(self, *names: str, within: float = 40) -> None:
        """Waits until each of the alerts has fired."""
        missing, began = set(names), time.monotonic()
        while missing and time.monotonic() - began < within:
            missing -= await self.prometheus.firing()
            await asyncio.sleep(0.3)
        took = f"{time.monotonic() - began:.0f} s"
        print(
            f"  {'MISSING ' + ', '.join(sorted(missing)) if missing else 'fired'}: {', '.join(names)} ({took})",
            flush=True,
        )

    async def run(self, only: list[str]) -> None:
        for step in only or STEPS:
            print(step.replace("_", " "), flush=True)
            await getattr(self, step)()

    async def in_order(self) -> None:
        async with self.load(2):
            await asyncio.sleep(8)

    async def prefixes(self) -> None:
        """The same prompt for a while, then never again."""
        for _ in range(100):
            await asyncio.gather(*(self.complete([5, 6, 7, 8] * 60, 1) for _ in range(2)))
        self.new_prompts = asyncio.create_task(self._new_prompts())

    async def _new_prompts(self) -> None:
        while True:
            await self.complete([random.randrange(1000, 40000) for _ in range(240)], 1)

    async def poison(self) -> None:
        await asyncio.gather(*(self.complete([_POISON + kind] * 4) for kind in (0, 1)))
        await self.fires("PagewireFailedSteps", "PagewireRequestsCondemned")

    async def flood(self) -> None:
        """More requests than rows, blocks and places in the queue."""
        async with self.load(60, words=60, max_tokens=320):
            await self.fires(
                "PagewireQueueLong", "PagewireRefusals", "PagewireKVCacheFull", "PagewirePreemptions",
                "PagewireFirstTokenSlow", "PagewireFirstTokenBudgetFast", "PagewireFirstTokenBudgetSlow",
                "PagewireTokensSlow", within=120,
            )  # fmt: skip
        await self.fires("PagewirePrefixHitsCollapsed", within=90)
        self.new_prompts.cancel()

    async def deadlines(self) -> None:
        async with self.load(12, max_tokens=1500, timeout_s=1.5):
            await self.fires("PagewireDeadlinesMissed", "PagewireErrorBudgetFast", "PagewireErrorBudgetSlow", within=50)

    async def busy_tokenizer(self) -> None:
        text = "All work and no play makes a queue. " * 20_000

        async def client() -> None:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    await self.http.post("/tokenize", json={"model": "m", "prompt": text})

        tasks = [asyncio.create_task(client()) for _ in range(6)]
        await self.fires("PagewireTokenizersBusy")
        workers = psutil.Process(self.line.pid("tokenizer")).children(recursive=True)
        max(workers, key=lambda one: sum(one.cpu_times()[:2])).kill()
        await self.fires("PagewireTokenizerWorkerDied")
        for task in tasks:
            task.cancel()

    async def paused_scheduler(self) -> None:
        """Stops the scheduler again and again, as on a machine without a core for it."""
        async with self.load(8, words=100, max_tokens=1):
            waiting = asyncio.create_task(self.fires("PagewireLateSteps", within=90))
            while not waiting.done():
                os.kill(self.line.pid("scheduler"), signal.SIGSTOP)
                await asyncio.sleep(0.3)
                os.kill(self.line.pid("scheduler"), signal.SIGCONT)
                await asyncio.sleep(0.1)

    async def stopped_executor(self) -> None:
        async with self.load(2):
            await asyncio.sleep(2)
            os.kill(self.line.pid("executor"), signal.SIGSTOP)
            await self.fires("PagewireStalled")
            os.kill(self.line.pid("executor"), signal.SIGCONT)

    async def lost_executor(self) -> None:
        self.line.kill("executor")
        await self.fires("PagewireNoExecutor", "PagewireExecutorLost")
        self.line.start("executor")
        await self.line.wait_ready()

    async def lost_tokenizer(self) -> None:
        self.line.kill("tokenizer")
        await self.fires("PagewireServiceMissing")
        self.line.start("tokenizer")
        await self.line.wait_ready()

    async def connections(self) -> None:
        async def unfinished() -> None:
            """A head that never ends, again and again: the gateway gives up each after some seconds."""
            while True:
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection("127.0.0.1", self.line.port)
                    with contextlib.closing(writer):
                        writer.write(b"GET / HTTP/1.1\r\n")
                        await reader.read()
                await asyncio.sleep(0.05)

        tasks = [asyncio.create_task(unfinished()) for _ in range(420)]
        await self.fires("PagewireConnectionsFull")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def lost_gateway(self) -> None:
        self.line.kill("gateway")
        await self.fires("PagewireDown")
        self.line.start("gateway")
        await self.line.wait_ready()


async def drill(keep: bool, only: list[str]) -> list[str]:
    """Runs the drill and returns what went wrong."""
    with tempfile.TemporaryDirectory(prefix="pw-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        line = FewConnections(directory, str(resolve_model(DEFAULT_MODEL)), **_FLAGS)
        prometheus = None
        try:
            for service in ("executor", "scheduler", "tokenizer", "gateway"):
                line.start(service)
            await line.wait_ready()
            prometheus = Prometheus(directory, line.port)
            await asyncio.sleep(3)
            await Drill(line, prometheus).run(only)
            return await judge(prometheus, complete=not only)
        finally:
            if prometheus is not None:
                if keep:
                    print(f"{prometheus.url} until Enter is pressed")
                    await asyncio.to_thread(input)
                prometheus.process.terminate()
                prometheus.process.wait()
            line.stop()


async def judge(prometheus: Prometheus, complete: bool) -> list[str]:
    began = time.monotonic()
    while (still := await prometheus.firing()) and time.monotonic() - began < 90:  # noqa: ASYNC110
        await asyncio.sleep(1)
    print(f"after {time.monotonic() - began:.0f} s of quiet: {', '.join(sorted(still)) or 'no alarm'}")
    missing = {alert.name for alert in rules.alerts(GOAL)} - await prometheus.ever_fired()
    if not complete:
        return [f"still fires: {name}" for name in sorted(still)]
    return [
        *(f"still fires: {name}" for name in sorted(still)),
        *(f"never fired: {name}" for name in sorted(missing)),
        *(f"no data: {panel}" for panel in await prometheus.panels_without_data()),
        *[f"no data: {name}" for name in rules.recordings(GOAL) if not await prometheus.range(name)],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.observability.live", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave Prometheus running at the end, to look at it")
    parser.add_argument("--only", nargs="+", default=[], choices=STEPS, metavar="STEP", help=f"of {', '.join(STEPS)}")
    if not shutil.which("prometheus"):
        parser.error("there is no prometheus here: apt install prometheus")
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    if faults := asyncio.run(drill(args.keep, args.only)):
        raise SystemExit("\n".join(faults))
    print("every alert ended" if args.only else "every panel has data; every alert fired and ended")


if __name__ == "__main__":
    main()
