"""`pagewire tune`."""

import logging
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pagewire import config, flags
from pagewire.errors import StartupError
from pagewire.files.writing import check_writable
from pagewire.flags.model_facts import ModelFacts, facts_of
from pagewire.process.process import usable_cores
from pagewire.tools.tune import trace, tree
from pagewire.tools.tune.config import TuneConfig
from pagewire.tools.tune.measure import Figures, measure
from pagewire.tools.tune.search import LEAST_OF_ONE, Found, Search, Slo

_WITHOUT = (*config.SET_BY_STACK, "port", "grpc_port", "admin_port", "scheduler_grpc_port", "uds_dir")
_SHOWN = (
    ("time to first token, mean, ms", "ttft_ms"),
    ("time to first token, p99, ms", "ttft_p99_ms"),
    ("time per output token, mean, ms", "tpot_ms"),
    ("time per output token, p99, ms", "tpot_p99_ms"),
    ("output tokens per second", "tokens_per_s"),
    ("memory of all processes, MiB", "resident_mib"),
)


def main(argv: Sequence[str]) -> int:
    """Returns 0, even if nothing better was found."""
    settings = flags.parse(
        TuneConfig,
        argv,
        prog="pagewire tune",
        description="Measures MODEL on this machine, tries flags that may help --goal one by one, in turns with the"
        " best so far, and writes those that help to a file for `pagewire serve --config`. Given flags of `pagewire"
        " serve` are not changed.",
        positional="model",
        without=_WITHOUT,
    )
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    requests, slo = trace.read(settings.trace), Slo.parse(settings.slo)
    serve = settings.part(config.ServeConfig)
    _check_writable(Path(settings.out))
    _check_time(requests, settings)
    given = {name for name in vars(serve) if getattr(serve, name) != getattr(config.ServeConfig(), name)}

    def measured(changes: Mapping[str, Any]) -> Figures:
        return measure(serve, changes, requests, settings.concurrency)

    model = facts_of(serve.model, serve.download_dir, serve.revision, serve.gguf)

    def may_help(seen: Figures) -> list[tree.Candidate]:
        of_goal = tree.candidates(
            settings.goal, serve, seen, mean_output=trace.mean_output(requests), cores=usable_cores(), model=model
        )
        return [one for one in of_goal if not given & set(one.flags)]

    print(f"{len(requests)} requests, goal {settings.goal}, at most {settings.minutes:g} minutes", flush=True)
    search = Search(
        settings.goal,
        measured,
        slo,
        settings.rounds,
        60 * settings.minutes,
        report=lambda text: print(text, flush=True),
    )
    try:
        found = search.run(may_help)
    except KeyboardInterrupt:
        print("stopped: nothing is written, as the chosen flags were not compared with the given ones")
        raise
    print("\n".join(summary(found, settings, model)))
    if found.changes:
        shown = given - {name.removeprefix("PAGEWIRE_").lower() for name in flags.secrets(serve)}
        _write(Path(settings.out), found, flags.to_argv(settings), shown, serve)
    return 0


def summary(found: Found, settings: TuneConfig, model: ModelFacts | None = None) -> list[str]:
    """Returns the lines of the report. model: None if its files are not known."""
    lines = ["the time is over: some flags were not tried (--minutes)"] if found.is_out_of_time else []
    shown = [figures for figures in (found.before, found.after) if figures is not None]
    lines.append(f"{'':<34}" + "".join(f"{title:>10}" for title in (["before", "after"] if shown[1:] else ["now"])))
    for title, name in _SHOWN:
        lines.append(f"{title:<34}" + "".join(f"{getattr(figures, name):>10.1f}" for figures in shown))
    if settings.rounds == 1:
        lines.append(f"one round does not distinguish a gain below {LEAST_OF_ONE:.0%} from chance: use more --rounds")
    if found.slo_broken:
        lines.append(f"--slo is not met, with or without the tried flags: {found.slo_broken}")
    if found.changes:
        return [*lines, f"{settings.goal} is better by at least {found.gain:.0%} in each round: {settings.out}"]
    return [
        *lines,
        "none of the tried flags is better in each round: keep the given ones. What else helps: "
        f"{tree.what_else(settings, model)}; `pagewire doctor` looks at the machine",
    ]


def _check_writable(path: Path) -> None:
    """Checks before minutes of measuring that the file can be written. Raises StartupError."""
    if path.is_dir() or not path.parent.is_dir():
        raise StartupError(f"--out {path}: it cannot be written; name another file")
    check_writable(path)


def _check_time(requests: Sequence[trace.Request], settings: TuneConfig) -> None:
    """Raises StartupError for a trace that takes longer than --minutes."""
    needed = trace.seconds(requests) * (1 + 4 * settings.rounds) / 60
    if needed > settings.minutes:
        raise StartupError(
            f"--trace takes {trace.seconds(requests):.0f} s, so that trying one flag takes {needed:.0f} minutes: give "
            f"--minutes {math.ceil(needed)} or more, fewer --rounds, or a shorter trace"
        )


def _write(path: Path, found: Found, argv: Sequence[str], given: set[str], serve: config.ServeConfig) -> None:
    """Writes the found and the given flags, so that the file is the complete configuration except secrets."""
    values = {name: getattr(serve, name) for name in sorted(given)} | found.changes
    text = yaml.safe_dump({flags.flag_name(name).removeprefix("--"): values[name] for name in values}, sort_keys=False)
    try:
        path.write_text(f"# pagewire tune {shlex.join(argv)}\n{text}")
    except OSError as error:
        raise StartupError(f"--out {path}: {error.strerror}; the flags are: {text}") from error
    print(text, end="", file=sys.stdout)
