"""`pagewire bench spec`: the gain of speculative decoding on this machine, by method and kind of text.

Each round starts a server for each method, one after the other, and sends the same prompts to it. Changes on the
machine between rounds affect all methods alike, so ratios are taken within a round.
"""

import dataclasses
import json
import logging
import shlex
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop

from pagewire import flags
from pagewire.config import SET_BY_STACK, ServeConfig
from pagewire.config.speculation import DRAFT_MODEL_METHODS, METHODS, SpeculationConfig
from pagewire.errors import StartupError
from pagewire.stack.own_stack import OwnStack
from pagewire.tools.bench import curves, drafts, load
from pagewire.tools.bench.config import BenchConfig
from pagewire.tools.bench.drafts import Drafts
from pagewire.tools.bench.report import percentile
from pagewire.tools.bench.request import Record, body
from pagewire.tools.bench.spec_config import SpecConfig, SpecFlags

PROMPTS = Path(__file__).parent / "spec_prompts.json"
_WITHOUT = (*SET_BY_STACK, *(one.name for one in dataclasses.fields(SpeculationConfig)), "port", "grpc_port")
_COLUMNS = ("prompts", "method", "drafts", "tok/s", "ratio", "accepted", "tok/step", "TTFT, ms", "TPOT, ms")


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
            return {}
        is_method = self.name in METHODS and self.name not in DRAFT_MODEL_METHODS
        kind = "spec_method" if is_method else "spec_model"
        adaptive = {"speculative_config": '{"adaptive": false}'} if self.is_fixed else {}
        return {kind: self.name, "spec_tokens": self.num_tokens} | adaptive


BASELINE = Method("none")


@dataclass
class Measured:
    """The measurements of a method on a kind of prompts."""

    rates: list[float] = field(default_factory=list)  # output tokens per second, by round
    records: list[Record] = field(default_factory=list)  # of answered requests
    drafts: Drafts = field(default_factory=Drafts)
    errors: list[str] = field(default_factory=list)

    def add(self, records: Sequence[Record], drafted: Drafts) -> None:
        answered = [record for record in records if record.error is None]
        self.errors += [record.error for record in records if record.error is not None]
        seconds = max(one.end for one in records) - min(one.start for one in records)
        self.rates.append(sum(one.completion_tokens for one in answered) / seconds)
        self.records += answered
        self.drafts += drafted

    def figures(self, baseline: "Measured") -> dict[str, Any]:
        """Returns the figures of the report. tokens_per_step: those of one request; 1 without drafts."""
        num_tokens = sum(one.completion_tokens for one in self.records)
        ratios = [rate / plain for rate, plain in zip(self.rates, baseline.rates, strict=True) if plain]
        ttft = percentile([one.ttft * 1e3 for one in self.records if one.ttft is not None], 50)
        tpot = percentile([one.tpot * 1e3 for one in self.records if one.tpot is not None], 50)
        return {
            "output_tok_per_s": round(statistics.median(self.rates), 2),
            "ratio": round(statistics.median(ratios), 3) if ratios else None,
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
        " per second and their ratio, share of accepted drafts, tokens per step of a request, time to"
        " first token (TTFT) and per output token after it (TPOT). Flags of `pagewire serve` apply to all of them.",
        without=_WITHOUT,
    )
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    prompts, wanted = _prompts(config), methods(config)
    curves.put(Path(config.json_out))  # fails now if it will not be possible
    measured = {(kind, method): Measured() for kind in prompts for method in wanted}
    for number in range(config.rounds):
        for method in wanted:
            print(f"round {number + 1} of {config.rounds}: {_name(method)}", flush=True)
            for kind, (records, drafted) in _measure(config, method, prompts).items():
                measured[kind, method].add(records, drafted)
    print("\n".join(table(list(prompts), wanted, measured)))
    _write(config, wanted, measured)
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
        chosen[path.stem if kind not in built_in else kind] = texts[: config.num_prompts + 1]
    return chosen


def _measure(
    config: SpecConfig, method: Method, prompts: dict[str, list[str]]
) -> dict[str, tuple[list[Record], Drafts]]:
    """Measures a separate server, by kind of prompt. Raises StartupError."""
    serve = config.part(ServeConfig, port=0, grpc_port=0, **method.flags())
    with closing(OwnStack(replace(serve, log_level="warning"))) as stack:
        stack.await_ready()
        bench = BenchConfig(
            base_url=stack.rest,
            endpoint="/v1/chat/completions",
            concurrency=config.concurrency,
            output_len=config.output_len,
            temperature=config.temperature,
            ignore_eos=config.ignore_eos,
            api_key=config.own_key,
        )
        return uvloop.run(_send(bench, prompts))


async def _send(bench: BenchConfig, prompts: dict[str, list[str]]) -> dict[str, tuple[list[Record], Drafts]]:
    measured = {}
    with closing(load.connect(bench)) as connection:
        model = (await load.served_model(connection, bench)).name
        for kind, texts in prompts.items():
            await load.must_answer(connection, bench, model, texts[-1], bench.output_len)
            before = await drafts.read(connection)
            # The seed makes every proposer draw the same tokens.
            bodies = [body(bench, model, text, bench.output_len) | {"seed": i} for i, text in enumerate(texts[:-1])]
            records = await load.run(bench, bodies)
            measured[kind] = records, (await drafts.read(connection)).since(before)
    return measured


def table(kinds: Sequence[str], wanted: Sequence[Method], measured: dict[tuple[str, Method], Measured]) -> list[str]:
    width = max(len(method.label) for method in wanted) + 2
    lines = [f"{_COLUMNS[0]:<10}{_COLUMNS[1]:<{width}}" + "".join(f"{title:>10}" for title in _COLUMNS[2:])]
    for kind in kinds:
        baseline = measured[kind, BASELINE]
        for method in wanted:
            of = measured[kind, method].figures(baseline)
            cells = [
                f"{method.num_tokens or '-'}",
                f"{of['output_tok_per_s']:.1f}",
                "-" if of["ratio"] is None else f"{of['ratio']:.2f}",
                f"{100 * of['acceptance']:.0f} %" if of["drafted_tokens"] else "-",
                f"{of['tokens_per_step']:.2f}",
                *("-" if of[name] is None else f"{of[name]:.1f}" for name in ("ttft_p50_ms", "tpot_p50_ms")),
            ]
            shown = kind if method is BASELINE else ""
            lines.append(f"{shown:<10}{method.label:<{width}}" + "".join(f"{cell:>10}" for cell in cells))
    return lines


def _write(config: SpecConfig, wanted: Sequence[Method], measured: dict[tuple[str, Method], Measured]) -> None:
    """Writes a curve for each method and kind of prompts over the number of drafts; that of the baseline is flat."""
    command = shlex.join(["pagewire", "bench", "spec", *flags.to_argv(config)])
    points: dict[str, list[curves.Point]] = {}
    for (kind, method), one in measured.items():
        figures = one.figures(measured[kind, BASELINE]) | {"prompts": kind, "method": method.label}
        for size in [method.num_tokens] if method.num_tokens else sorted(set(config.draft_tokens)):
            points.setdefault(f"{method.label}, {kind}", []).append({"draft_tokens": size} | figures)
    made = [curves.Curve.taken_now("speculation", label, config.model, command, of) for label, of in points.items()]
    curves.put(Path(config.json_out), *made)


def _name(method: Method) -> str:
    return f"{method.label}, {method.num_tokens} drafts" if method.num_tokens else "no drafts"
