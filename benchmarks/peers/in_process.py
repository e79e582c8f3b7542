"""The loads of `pagewire bench sweep` on a library: its curves beside those of servers."""

import asyncio
import random
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pagewire import flags
from pagewire.config.fields import POSITIVE, flag
from pagewire.errors import StartupError
from pagewire.tools.bench.config import SweepFlags
from pagewire.tools.bench.growth import Growth, Load, loads
from pagewire.tools.bench.prompts import RandomWords
from pagewire.tools.bench.report import percentile


@dataclass(frozen=True, kw_only=True)
class PeerFlags(SweepFlags):
    """The flags of every library."""

    model: str = flag("", "model in the library's own format", group="model")
    max_model_len: int = flag(8192, "longest request, tokens", group="model", valid=POSITIVE)
    threads: int = flag(2, "threads that compute", group="load", valid=POSITIVE)


Flags = TypeVar("Flags", bound=PeerFlags)


@dataclass(frozen=True)
class Times:
    """The seconds of one request from the start of its batch to its first and to its last token."""

    first: float
    last: float


class Engine(Protocol):
    def count_tokens(self, text: str) -> int: ...

    def generate(self, prompts: Sequence[str], output_len: int) -> list[Times]:
        """Greedy, exactly output_len tokens for each, all prompts handed over at once."""
        ...


def main(module: str, flags_class: type[Flags], description: str, load: Callable[[Flags], Engine]) -> int:
    config = flags.parse(
        flags_class,
        sys.argv[1:],
        prog=f"python -m {module}",
        description=description,
        positional="model",
        flags_only=True,
    )
    try:
        if not Path(config.model).exists():
            raise StartupError(f"no model {config.model!r}: name one in the library's own format")
        _sweep(config, load, shlex.join(["python", "-m", module, *flags.to_argv(config)]))
    except StartupError as error:
        print(f"{module}: error: {error}", file=sys.stderr)
        return 1
    return 0


def _sweep(config: Flags, load: Callable[[Flags], Engine], command: str) -> None:
    planned = loads(config, config.max_model_len)
    growth = Growth(config, Path(config.model).name, command)
    engine = load(config)

    async def count_tokens(text: str) -> int:
        return engine.count_tokens(text)

    seed = random.randrange(2**32) if config.seed is None else config.seed
    words = asyncio.run(RandomWords.measured(seed, planned[-1].input_len, count_tokens))
    engine.generate(words.prompts(planned[0].input_len, 1), planned[0].output_len)
    for one in planned:
        growth.add(one, _measure(engine, one, words.prompts(one.input_len, one.num_prompts)), Counter())


def _measure(engine: Engine, load: Load, prompts: Sequence[str]) -> dict[str, Any]:
    """Batches of `concurrency` requests, one after the other."""
    batches = [prompts[i : i + load.concurrency] for i in range(0, len(prompts), load.concurrency)]
    runs = [engine.generate(batch, load.output_len) for batch in batches]
    times = [one for run in runs for one in run]
    wall = sum(max(one.last for one in run) for run in runs)
    series = {"ttft": [one.first for one in times]}
    if load.output_len > 1:
        series["tpot"] = [(one.last - one.first) / (load.output_len - 1) for one in times]
    figures: dict[str, Any] = {
        "prompt_tokens": max(map(engine.count_tokens, prompts)),
        "output_tok_per_s": round(len(times) * load.output_len / wall, 2),
        "req_per_s": round(len(times) / wall, 3),
    }
    for name, values in series.items():
        figures |= {f"{name}_p{q}_ms": round(1e3 * (percentile(values, q) or 0), 3) for q in (50, 99)}
    return figures
