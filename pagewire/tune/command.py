"""`pagewire tune`."""

import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pagewire import config, flags
from pagewire.errors import StartupError
from pagewire.process import usable_cores
from pagewire.tune import trace, tree
from pagewire.tune.config import TuneConfig
from pagewire.tune.measure import Figures, measure
from pagewire.tune.search import LEAST_GAIN, Found, Search, Slo

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
    """0, also if nothing better was found."""
    settings = flags.parse(
        TuneConfig,
        argv,
        prog="pagewire tune",
        description="Measures MODEL on this machine, tries flags that may help --goal one by one, in turns with what is"
        " best so far, and writes those that do to a file for `pagewire serve --config`. Flags of `pagewire serve` that"
        " are given stay as they are.",
        positional="model",
        without=_WITHOUT,
    )
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    requests, slo = trace.read(settings.trace), Slo.parse(settings.slo)
    serve = settings.part(config.ServeConfig)
    given = {name for name in vars(serve) if getattr(serve, name) != getattr(config.ServeConfig(), name)}

    def measured(changes: Mapping[str, Any]) -> Figures:
        return measure(serve, changes, requests, settings.concurrency)

    def may_help(seen: Figures) -> list[tree.Candidate]:
        of_goal = tree.candidates(
            settings.goal, serve, seen, mean_output=trace.mean_output(requests), cores=usable_cores()
        )
        return [one for one in of_goal if not given & set(one.flags)]

    print(f"{len(requests)} requests, goal {settings.goal}, at most {settings.minutes:g} minutes", flush=True)
    search = Search(
        settings.goal,
        measured,
        slo,
        settings.rounds,
        60 * settings.minutes,
        tell=lambda text: print(text, flush=True),
    )
    found = search.run(may_help)
    print("\n".join(summary(found, settings)))
    if found.changes:
        _write(Path(settings.out), found, argv, given, serve)
    return 0


def summary(found: Found, settings: TuneConfig) -> list[str]:
    lines = ["the time is over: not all was tried (--minutes)"] if found.is_out_of_time else []
    if found.before is not None and found.after is not None:
        lines.append(f"{'':<34}{'before':>10}{'after':>10}")
        lines += [
            f"{title:<34}{getattr(found.before, name):>10.1f}{getattr(found.after, name):>10.1f}"
            for title, name in _SHOWN
        ]
    if found.changes:
        return [*lines, f"{settings.goal} is better by at least {found.gain:.0%} in each round: {settings.out}"]
    return [
        *lines,
        f"nothing that was tried beats the flags as they are by {LEAST_GAIN:.0%} in each round: keep them. "
        "What else helps: weights in 4 bits (pagewire quantize), more devices; `pagewire doctor` looks at the machine",
    ]


def _write(path: Path, found: Found, argv: Sequence[str], given: set[str], serve: config.ServeConfig) -> None:
    """With what was given on the command line, so that the file is all of it."""
    values = {name: getattr(serve, name) for name in sorted(given)} | found.changes
    text = yaml.safe_dump({flags.flag_name(name).removeprefix("--"): values[name] for name in values}, sort_keys=False)
    try:
        path.write_text(f"# pagewire tune {shlex.join(argv)}\n{text}")
    except OSError as error:
        raise StartupError(f"--out {path}: {error.strerror}; the flags are: {text}") from error
    print(text, end="", file=sys.stdout)
