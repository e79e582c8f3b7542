"""`pagewire bench spec`: the gain of speculative decoding on this machine, by method and kind of text.

Each round starts a server for each method, one after the other, and sends the same prompts to it; or, side by side, all
servers take turns. Changes on the machine between rounds affect all methods alike, so ratios are taken within a round.
"CPU" is the ratio of the processor time of all processes of the servers, which depends little on other load.
"""

import dataclasses
import json
import logging
import random
import shlex
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import uvloop

from pagewire import flags
from pagewire.config import SET_BY_STACK, ServeConfig
from pagewire.config.speculation import DRAFT_MODEL_METHODS, METHODS, SpeculationConfig
from pagewire.errors import StartupError
from pagewire.stack.own_stack import OwnStack
from pagewire.tools.bench import curves, drafts
from pagewire.tools.bench.config import BenchConfig
from pagewire.tools.bench.drafts import Drafts
from pagewire.tools.bench.load import connect, must_answer, run, served_model
from pagewire.tools.bench.processor_time import await_idle, processor_seconds
from pagewire.tools.bench.prompts import RandomWords
from pagewire.tools.bench.report import percentile
from pagewire.tools.bench.request import Record, body
from pagewire.tools.bench.spec_config import SpecConfig, SpecFlags

PROMPTS = Path(__file__).parent / "spec_prompts.json"
_WITHOUT = (*SET_BY_STACK, *(one.name for one in dataclasses.fields(SpeculationConfig)), "port", "grpc_port")
_COLUMNS = ("prompts", "method", "drafts", "tok/s", "ratio", "CPU", "accepted", "tok/step", "TTFT, ms", "TPOT, ms")
_RANDOM, _RANDOM_TEMPERATURE, _RANDOM_WORDS = "random", 2.0, 32


@dataclass(frozen=True)
class Method:
    """A way to draft. num_tokens: the most tokens that it drafts; 0: no drafts. is_fixed: it always drafts that
    many."""

    name: str
    num_tokens: int = 0
    is_fixed: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}, fixed" if self.is_fixed else self.name

    def flags(self) -> dict[str, Any]:
        """Returns the flags that make a server draft like this."""
        if not self.num_tokens:
            return {"spec_method": "none"}
        is_method = self.name in (*METHODS, "auto") and self.name not in DRAFT_MODEL_METHODS
        kind = "spec_method" if is_method else "spec_model"
        adaptive = {"speculative_config": '{"adaptive": false}'} if self.is_fixed else {}
        return {kind: self.name, "spec_tokens": self.num_tokens} | adaptive


BASELINE = Method("none")


@dataclass(frozen=True)
class Load:
    """A kind of prompts, sent by a number of streams."""

    kind: str
    streams: int

    @property
    def label(self) -> str:
        return self.kind if self.streams == 1 else f"{self.kind}, {self.streams}"


@dataclass(frozen=True)
class Sample:
    """One measurement. cpu: processor seconds of the server; None: unknown."""

    records: list[Record]
    drafts: Drafts
    cpu: float | None = None


@dataclass
class Measured:
    """The measurements of a method under a load."""

    rates: list[float] = field(default_factory=list)  # output tokens per second, by round
    costs: list[float | None] = field(default_factory=list)  # processor seconds per output token, by round
    records: list[Record] = field(default_factory=list)  # of answered requests
    drafts: Drafts = field(default_factory=Drafts)
    errors: list[str] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        answered = [record for record in sample.records if record.error is None]
        self.errors += [record.error for record in sample.records if record.error is not None]
        seconds = max(one.end for one in sample.records) - min(one.start for one in sample.records)
        num_tokens = sum(one.completion_tokens for one in answered)
        self.rates.append(num_tokens / seconds)
        self.costs.append(None if sample.cpu is None else sample.cpu / max(1, num_tokens))
        self.records += answered
        self.drafts += sample.drafts

    def figures(self, baseline: "Measured") -> dict[str, Any]:
        """Returns the figures of the report. tokens_per_step: those of one request; 1 without drafts."""
        num_tokens = sum(one.completion_tokens for one in self.records)
        ratios = [rate / plain for rate, plain in zip(self.rates, baseline.rates, strict=True) if plain]
        costs = [cost / plain for cost, plain in zip(self.costs, baseline.costs, strict=True) if cost and plain]
        ttft = percentile([one.ttft * 1e3 for one in self.records if one.ttft is not None], 50)
        tpot = percentile([one.tpot * 1e3 for one in self.records if one.tpot is not None], 50)
        return {
            "output_tok_per_s": round(statistics.median(self.rates), 2),
            "ratio": round(statistics.median(ratios), 3) if ratios else None,
            "cpu_ratio": round(statistics.median(costs), 3) if costs else None,
            "tokens_per_step": round(self._tokens_per_step(num_tokens), 3),
            "ttft_p50_ms": None if ttft is None else round(ttft, 2),
            "tpot_p50_ms": None if tpot is None else round(tpot, 3),
            "num_requests": len(self.records),
            "output_tokens": num_tokens,
        } | self.drafts.figures()

    def _tokens_per_step(self, num_tokens: int) -> float:
        """Returns the tokens per step: each accepted draft saves a step. Servers also count drafts after a request's
        end, so the result is limited to the gain of steps with drafts."""
        if not self.drafts.num_drafts:
            return 1.0
        num_steps = max(1.0, num_tokens - self.drafts.num_accepted)
        return min(num_tokens / num_steps, 1 + self.drafts.num_accepted / self.drafts.num_drafts)


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 if any request failed."""
    config = flags.parse(
        SpecConfig,
        argv,
        prog="pagewire bench spec",
        description="Starts a server without drafts and one for each method, in turns, and compares them: output tokens"
        " per second and their ratio, the ratio of processor time per token (CPU), share of accepted drafts, tokens per"
        " step of a request, time to first token (TTFT) and per output token after it (TPOT). Flags of `pagewire serve`"
        " apply to all of them.",
        without=_WITHOUT,
    )
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    prompts, wanted = _prompts(config), methods(config)
    curves.put(Path(config.json_out))  # fails now if it will not be possible
    loads = [Load(kind, streams) for kind in prompts for streams in dict.fromkeys(config.streams)]
    measured = {(load, method): Measured() for load in loads for method in wanted}
    for load, method, sample in _samples(config, wanted, loads, prompts):
        measured[load, method].add(sample)
    print("\n".join(table(loads, wanted, measured)))
    _write(config, measured)
    failed = [error for one in measured.values() for error in one.errors]
    if failed:
        print(f"{len(failed)} requests failed, the first with: {failed[0]}")
    return 1 if failed else 0


def methods(config: SpecFlags) -> list[Method]:
    """Returns the baseline, then each method with each number of tokens. Raises StartupError."""
    names = [name.strip() for name in config.methods.split(",") if name.strip()]
    if not names:
        raise StartupError("--methods: nothing to compare; name methods, for instance ngram,suffix")
    return [
        BASELINE,
        *(
            Method(name, size, is_fixed)
            for name in dict.fromkeys(names)
            for size in sorted(set(config.draft_tokens))
            for is_fixed in ((False, True) if config.also_fixed else (False,))
        ),
    ]


def _prompts(config: SpecFlags) -> dict[str, list[str]]:
    """Returns prompts by kind: the measured ones and, if there are enough, one more; the last warms up. Raises
    StartupError."""
    built_in: dict[str, list[str]] = json.loads(PROMPTS.read_text())
    words = RandomWords(random.Random(0), per_word=1.0, constant=0.0)
    built_in[_RANDOM] = words.prompts(_RANDOM_WORDS, max(config.num_prompts, *config.streams) + 1)
    chosen = {}
    for kind in dict.fromkeys(config.prompts.split(",")):
        if kind in built_in:
            texts = built_in[kind]
        elif (path := Path(kind)).exists():
            try:
                texts = [str(json.loads(line)["prompt"]) for line in path.read_text().splitlines() if line.strip()]
            except (ValueError, KeyError, TypeError) as error:
                raise StartupError(f'{path}: expected JSON lines {{"prompt": "..."}} ({error!r})') from error
        else:
            raise StartupError(f"--prompts {kind}: neither a kind ({', '.join(built_in)}) nor a file")
        if len(texts) < 2:
            raise StartupError(f"--prompts {kind}: at least two are needed, one of which warms up")
        most = len(texts) if kind == _RANDOM else config.num_prompts + 1
        chosen[path.stem if kind not in built_in else kind] = texts[:most]
    return chosen


def _samples(
    config: SpecConfig, wanted: Sequence[Method], loads: Sequence[Load], prompts: dict[str, list[str]]
) -> Iterator[tuple[Load, Method, Sample]]:
    """Yields the measurements of all rounds. Raises StartupError."""
    with ExitStack() as all_servers:
        kept = {one: all_servers.enter_context(_server(config, one)) for one in wanted if config.side_by_side}
        for number in range(config.rounds):
            print(f"round {number + 1} of {config.rounds}", flush=True)
            if kept:
                turns = kept.items() if number % 2 else reversed(kept.items())
                for load, (method, stack) in product(loads, list(turns)):
                    yield load, method, uvloop.run(_send(config, stack, load, prompts[load.kind]))
                continue
            for method in wanted:
                print(_name(method), flush=True)
                with _server(config, method) as stack:
                    for load in loads:
                        yield load, method, uvloop.run(_send(config, stack, load, prompts[load.kind]))


@contextmanager
def _server(config: SpecConfig, method: Method) -> Iterator[OwnStack]:
    """Starts a server that drafts like this, and lets it prepare. Raises StartupError."""
    serve = config.part(ServeConfig, port=0, grpc_port=0, **method.flags())
    with closing(OwnStack(replace(serve, log_level="warning"))) as stack:
        stack.await_ready()
        await_idle(stack.pid)
        yield stack


async def _send(config: SpecConfig, stack: OwnStack, load: Load, texts: Sequence[str]) -> Sample:
    """Sends the requests of a load, after one that warms up."""
    bench = BenchConfig(
        base_url=stack.rest,
        endpoint="/v1/chat/completions",
        concurrency=load.streams,
        output_len=config.output_len,
        temperature=_RANDOM_TEMPERATURE if load.kind == _RANDOM else config.temperature,
        ignore_eos=config.ignore_eos or load.kind == _RANDOM,
        api_key=config.own_key,
    )
    with closing(connect(bench)) as connection:
        model = (await served_model(connection, bench)).name
        await must_answer(connection, bench, model, texts[-1], min(16, bench.output_len))
        # The seed makes every proposer draw the same tokens.
        bodies = [
            body(bench, model, _numbered(texts[:-1], number), bench.output_len) | {"seed": number}
            for number in range(max(config.num_prompts, load.streams))
        ]
        before, cpu_before = await drafts.read(connection), processor_seconds(stack.pid)
        records = await run(bench, bodies)
        cpu = processor_seconds(stack.pid)
        drafted = (await drafts.read(connection)).since(before)
    return Sample(records, drafted, None if cpu is None or cpu_before is None else cpu - cpu_before)


def _numbered(texts: Sequence[str], number: int) -> str:
    """Returns the text of a request; one that is used again differs by a number in front."""
    again, index = divmod(number, len(texts))
    return f"{again + 1}. {texts[index]}" if again else texts[index]


def table(loads: Sequence[Load], wanted: Sequence[Method], measured: dict[tuple[Load, Method], Measured]) -> list[str]:
    width = max(len(method.label) for method in wanted) + 2
    first = max(len(label) for label in (_COLUMNS[0], *(load.label for load in loads))) + 2
    lines = [f"{_COLUMNS[0]:<{first}}{_COLUMNS[1]:<{width}}" + "".join(f"{title:>10}" for title in _COLUMNS[2:])]
    for load in loads:
        baseline = measured[load, BASELINE]
        for method in wanted:
            of = measured[load, method].figures(baseline)
            cells = [
                f"{method.num_tokens or '-'}",
                f"{of['output_tok_per_s']:.1f}",
                *("-" if of[name] is None else f"{of[name]:.2f}" for name in ("ratio", "cpu_ratio")),
                f"{100 * of['acceptance']:.0f} %" if of["drafted_tokens"] else "-",
                f"{of['tokens_per_step']:.2f}",
                *("-" if of[name] is None else f"{of[name]:.1f}" for name in ("ttft_p50_ms", "tpot_p50_ms")),
            ]
            shown = load.label if method is BASELINE else ""
            lines.append(f"{shown:<{first}}{method.label:<{width}}" + "".join(f"{cell:>10}" for cell in cells))
    return lines


def _write(config: SpecConfig, measured: dict[tuple[Load, Method], Measured]) -> None:
    """Writes a curve for each method and kind of prompts over the number of drafts; that of the baseline is flat."""
    command = shlex.join(["pagewire", "bench", "spec", *flags.to_argv(config)])
    points: dict[str, list[curves.Point]] = {}
    for (load, method), one in measured.items():
        figures = one.figures(measured[load, BASELINE])
        figures |= {"prompts": load.kind, "streams": load.streams, "method": method.label}
        for size in [method.num_tokens] if method.num_tokens else sorted(set(config.draft_tokens)):
            points.setdefault(f"{method.label}, {load.label}", []).append({"draft_tokens": size} | figures)
    made = [curves.Curve.taken_now("speculation", label, config.model, command, of) for label, of in points.items()]
    curves.put(Path(config.json_out), *made)


def _name(method: Method) -> str:
    return f"{method.label}, {method.num_tokens} drafts" if method.num_tokens else "no drafts"
