"""Measures the memory of a stack, process by process: `python -m benchmarks.memory [--pid PID] [FLAGS OF serve]`.

Starts `pagewire serve`, or uses a running one (`--pid`, which listens on `--port`), and measures its processes when
they are ready, after many requests at once, after as many one by one, after prompts of all recorded lengths, and after
each long prompt. In MiB:

- PSS: the process's own pages and its share of mapped ones, that is anonymous memory, files (libraries) and shared
  memory.
- weights: the tensors of the model. KV cache: the touched pages of its tensors (`mincore`). The executor reports both.
- rest: PSS of all processes minus weights and KV cache.
"""

import json
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import serving
from pagewire import flags
from pagewire.config import ServeConfig
from pagewire.config.fields import NOT_NEGATIVE, POSITIVE, flag
from pagewire.services.executor.graphs.recorded_steps import TOKENS

MIB = 1 << 20
_WEIGHTS = "pagewire:executor_weight_bytes"
_KV_CACHE = "pagewire:executor_kv_cache_resident_bytes"
_COLUMNS = ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem", "Rss")
_HEADINGS = ("PSS", "anonymous", "files", "shared", "RSS")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(ServeConfig):
    """The stack, and the load."""

    pid: int | None = flag(None, "a `pagewire serve` that runs already, on --port", group="load", valid=POSITIVE)
    streams: int = flag(64, "requests at once", group="load", valid=NOT_NEGATIVE)
    prompts: tuple[int, ...] = flag((2048, 8000), "tokens of each long prompt", group="load", valid=POSITIVE)


def main() -> None:
    config = flags.parse(
        MemoryConfig, sys.argv[1:], prog="python -m benchmarks.memory", description="What serving takes of memory."
    )
    with _stack(config) as (root, port):
        url = f"http://127.0.0.1:{port}"
        report("ready", root, url)
        if config.streams:
            serving.drive(url, num_requests=config.streams, concurrency=config.streams, input_len=128, output_len=128)
            report(f"after {config.streams} requests of 128 + 128 tokens at once", root, url)
            end_one_by_one(url, config.streams)
            report(f"after {config.streams} short ones that end one by one", root, url)
        for length in TOKENS:  # each of them is recorded
            serving.drive(url, num_requests=1, concurrency=1, input_len=length, output_len=1)
        report(f"after prompts of {TOKENS[0]} to {TOKENS[-1]} tokens", root, url)
        for length in config.prompts:
            serving.drive(url, num_requests=1, concurrency=1, input_len=length, output_len=1)
            report(f"after a prompt of {length:,} tokens", root, url)


@contextmanager
def _stack(config: MemoryConfig) -> Iterator[tuple[psutil.Process, int]]:
    if config.pid is not None:
        yield psutil.Process(config.pid), config.port
        return
    with serving.server(config) as started:
        yield started


def end_one_by_one(url: str, num_requests: int) -> None:
    """Requests that start together and end two steps apart: decode steps of every number of requests are recorded."""
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]

    def complete(number: int) -> None:
        body = {"model": model, "prompt": f"{number}.", "max_tokens": 2 * number, "ignore_eos": True}
        body |= {"temperature": 1.0, "top_p": 1.0}  # not the model's defaults
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            response.read()

    with ThreadPoolExecutor(num_requests) as pool:
        list(pool.map(complete, range(1, num_requests + 1)))


def report(moment: str, root: psutil.Process, url: str) -> None:
    processes = [
        (command(process.cmdline()), rollup(process.pid)) for process in (root, *root.children(recursive=True))
    ]
    print(f"\n{moment}, MiB\n{'':12}" + "".join(f"{heading:>11}" for heading in _HEADINGS))
    for process, sizes in processes:
        print(f"{process:12}" + "".join(f"{sizes[column] / MIB:11.1f}" for column in _COLUMNS))
    totals = {column: sum(sizes[column] for _, sizes in processes) for column in _COLUMNS}
    print(f"{'all':12}" + "".join(f"{totals[column] / MIB:11.1f}" for column in _COLUMNS))
    weights, kv_cache = gauges(url, (_WEIGHTS, _KV_CACHE))
    rest = totals["Pss"] - weights - kv_cache
    print(
        f"weights {weights / MIB:.1f}, KV cache {kv_cache / MIB:.1f}, rest {rest / MIB:.1f} ({rest / 1e9:.3f} GB)",
        flush=True,
    )


def command(arguments: Sequence[str]) -> str:
    """The command in a command line of Pagewire: `pagewire serve ...`, `python -m pagewire.cli executor ...`."""
    index = next(
        (i for i, argument in enumerate(arguments) if Path(argument).name in ("pagewire", "pagewire.cli")), None
    )
    if index is None:
        raise SystemExit(
            f"a process of the stack is not Pagewire's: {' '.join(arguments)}; is --pid a `pagewire serve`?"
        )
    return arguments[index + 1]


def rollup(pid: int) -> dict[str, int]:
    """Bytes by what /proc/PID/smaps_rollup calls them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    fields = (line.split() for line in lines)
    return {key.removesuffix(":"): int(kib) * 1024 for key, kib, _ in fields}


def gauges(url: str, names: Sequence[str]) -> list[float]:
    """Values of the stack's metrics. Exits if it has none of a name."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        families = text_string_to_metric_families(response.read().decode())
        values = {sample.name: sample.value for family in families for sample in family.samples}
    missing = [name for name in names if name not in values]
    if missing:
        raise SystemExit(f"{url}/metrics has no {', '.join(missing)}: is its executor ready, and of this version?")
    return [values[name] for name in names]


if __name__ == "__main__":
    main()
