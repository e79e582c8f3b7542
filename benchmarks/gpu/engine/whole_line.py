"""`pagewire serve` on a model with random weights, and clients that count its tokens.

What is measured is steady decoding: from when every stream has its first token to when the first stream ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pagewire.tools.bench.config import BenchConfig
from pagewire.tools.bench.http import Connection
from pagewire.tools.bench.report import percentile
from pagewire.tools.bench.request import body

START_TIMEOUT_S = 150.0
RUN_TIMEOUT_S = 120.0
SERVED_NAME = "bench"
# Streams of one process: one alone would be the bottleneck, not the server.
STREAMS_PER_CLIENT = 64

Stream = list[tuple[float, int]]  # (time.perf_counter(), tokens that came then)


class LineError(Exception):
    """The stack does not start, or a stream fails."""


@dataclass(frozen=True)
class Arrivals:
    """The times and numbers of tokens that each stream received."""

    streams: list[Stream]

    @property
    def _window(self) -> tuple[float, float]:
        start, end = max(stream[0][0] for stream in self.streams), min(stream[-1][0] for stream in self.streams)
        if end <= start:
            raise LineError("a stream ended before all had begun; they have too few tokens to generate")
        return start, end

    @property
    def window_seconds(self) -> float:
        start, end = self._window
        return end - start

    @property
    def tokens_per_second(self) -> float:
        start, end = self._window
        return sum(n for stream in self.streams for at, n in stream if start < at <= end) / (end - start)

    @property
    def mean_tokens(self) -> float:
        """Returns the tokens of a stream in the middle of the window."""
        start, end = self._window
        before = sum(n * ((at <= start) + (at <= end)) / 2 for stream in self.streams for at, n in stream)
        return before / len(self.streams)

    def gap(self, q: float) -> float:
        """Percentile of the inter-token latency, seconds; tokens that come together have one gap."""
        start, end = self._window
        gaps = [
            later - at
            for stream in self.streams
            for (at, _), (later, _) in itertools.pairwise(stream)
            if start <= at and later <= end
        ]
        return percentile(gaps, q) or math.nan


@dataclass(frozen=True)
class Line:
    """A running stack."""

    base_url: str
    scheduler_address: str


@contextmanager
def serving(model: Path, flags: Mapping[str, object]) -> Iterator[Line]:
    """`pagewire serve` until the block ends. Raises LineError with the end of its log."""
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as directory:
        port, grpc_port = _free_port(), _free_port()
        log = Path(directory) / "serve.log"
        command = [sys.executable, "-m", "pagewire.cli", "serve", "--model", str(model), "--load-format", "dummy",
                   "--served-model-name", SERVED_NAME, "--uds-dir", directory, "--port", str(port),
                   "--grpc-port", str(grpc_port), "--no-enable-prefix-caching"]  # fmt: skip
        for name, value in flags.items():
            command += [f"--{name}", str(value)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        line = Line(f"http://127.0.0.1:{port}", f"unix:{directory}/scheduler.sock")
        try:
            _wait_ready(line, process, log)
            yield line
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(line: Line, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            with opener.open(f"{line.base_url}/readyz", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            text = log.read_text(errors="replace").strip()[-800:]
            raise LineError(f"`pagewire serve` is not ready: {text}")
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def token_level(line: Line, prompts: Sequence[Sequence[int]], max_tokens: int) -> Arrivals:
    """Token ids from the scheduler, over one stream for all requests, as tokenizer services do."""
    return Arrivals(asyncio.run(asyncio.wait_for(_token_level(line, prompts, max_tokens), RUN_TIMEOUT_S)))


async def _token_level(line: Line, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Stream]:
    # Imported here: the executor alone can be measured where there is no gRPC.
    from pagewire.v1 import common_pb2
    from pagewire.v1.scheduler_link_pb2 import SchedulerLinkServiceConnectRequest, TokenSubmission
    from pagewire.v1.scheduler_link_pb2_grpc import SchedulerLinkServiceStub
    from pagewire.v1.scheduler_pb2 import TokenRequest
    from pagewire.wire import rpc

    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    requests = [
        TokenSubmission(request_id=index, request=TokenRequest(prompt_token_ids=prompt, sampling_params=sampling))
        for index, prompt in enumerate(prompts)
    ]
    streams: list[Stream] = [[] for _ in prompts]
    open_streams = set(range(len(prompts)))
    async with rpc.channel(line.scheduler_address) as channel:
        call = SchedulerLinkServiceStub(channel).Connect()
        await call.write(SchedulerLinkServiceConnectRequest(requests=requests))
        while open_streams:
            news = await call.read()
            now = time.perf_counter()
            for index, count, reason in zip(news.request_ids, news.num_tokens, news.finish_reasons, strict=True):
                if count:
                    streams[index].append((now, count))
                if reason:
                    open_streams.discard(index)
            if news.errors:
                raise LineError(f"a request failed: {next(iter(news.errors.values())).message}")
        call.cancel()
    return _complete(streams, max_tokens)


def rest(line: Line, prompts: Sequence[Sequence[int]], max_tokens: int) -> Arrivals:
    """Text from the gateway, as server-sent events, to a few client processes that start together."""
    texts = [" ".join(f"w{token}" for token in prompt) for prompt in prompts]
    command = [sys.executable, "-m", "benchmarks.gpu.engine.whole_line"]
    clients = []
    for first in range(0, len(texts), STREAMS_PER_CLIENT):
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        load = {"url": line.base_url, "prompts": texts[first : first + STREAMS_PER_CLIENT], "max_tokens": max_tokens}
        _tell(client, json.dumps(load))
        clients.append(client)
    for client in clients:
        _hear(client)  # it is ready
    for client in clients:
        _tell(client, "go")
    streams = [[(at, n) for at, n in stream] for client in clients for stream in json.loads(_hear(client))]
    for client in clients:
        client.communicate()
    return Arrivals(_complete(streams, max_tokens))


def _tell(client: subprocess.Popen[str], line: str) -> None:
    assert client.stdin is not None
    client.stdin.write(f"{line}\n")
    client.stdin.flush()


def _hear(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    if not (line := client.stdout.readline()):
        raise LineError("a client of the gateway ended early; its error is above")
    return line


def client_main() -> None:
    """One client process: the load as a line of JSON, "ready", "go", the streams as a line of JSON."""
    load = json.loads(sys.stdin.readline())
    print("ready", flush=True)
    sys.stdin.readline()
    streams = asyncio.run(asyncio.wait_for(_rest_streams(**load), RUN_TIMEOUT_S))
    print(json.dumps(streams), flush=True)


async def _rest_streams(url: str, prompts: list[str], max_tokens: int) -> list[Stream]:
    config = BenchConfig()

    async def stream(prompt: str) -> Stream:
        arrivals = []
        connection = Connection(url, {})
        async for event in connection.events("/v1/completions", body(config, SERVED_NAME, prompt, max_tokens)):
            now = time.perf_counter()
            if event.get("error"):
                raise LineError(str(event["error"])[:300])
            # One word is one token.
            if count := sum(len(choice["text"].split()) for choice in event.get("choices") or ()):
                arrivals.append((now, count))
        connection.close()
        return arrivals

    return list(await asyncio.gather(*map(stream, prompts)))


def _complete(streams: list[Stream], max_tokens: int) -> list[Stream]:
    """The streams, if all brought what was asked for."""
    for stream in streams:
        if (count := sum(n for _, n in stream)) != max_tokens:
            raise LineError(f"a stream brought {count} of {max_tokens} tokens")
    return streams


CLIENTS: dict[str, Callable[[Line, Sequence[Sequence[int]], int], Arrivals]] = {
    "token ids": token_level,
    "REST": rest,
}


if __name__ == "__main__":
    client_main()
