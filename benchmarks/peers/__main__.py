"""Measures Pagewire beside OpenVINO GenAI, llama.cpp and vLLM, each in a process of its own.

`python -m benchmarks.peers --openvino PYTHON --llamacpp PYTHON --vllm PYTHON --out FILE.md`. Each PYTHON is that of an
environment with the package: openvino-genai and optimum-intel[openvino], llama-cpp-python, vllm. A peer without a
Python is left out, and named. Models are converted into --cache once. The machine must be quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import AutoTokenizer

import pagewire
from benchmarks.peers.contest import Contest, Runner
from benchmarks.peers.contestants import Pythons, field_of
from benchmarks.peers.models import MODELS, REPOSITORY, Files, Model
from benchmarks.peers.rows import ROWS, Row, measured_by
from benchmarks.peers.table import Taken, page
from pagewire.errors import StartupError
from pagewire.tools.bench import curves
from pagewire.tools.bench.prompts import RandomWords

# Words are counted with a prompt of this length.
COUNTED_LEN = 512
LIMIT = 2.0
# The instructions that tell apart machines of the same name.
TOLD = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx2")


def main() -> int:
    args = arguments().parse_args()
    # Unlike the signal's default, this ends the contestants as well.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    pythons = Pythons(args.openvino, args.llamacpp, args.vllm, args.use_extra_bufts)
    contests: dict[str, Contest] = {}
    taken = Taken(
        machine(),
        time.strftime("%Y-%m-%d"),
        versions(),
        shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]]),
        args.rounds,
        args.limit,
    )
    try:
        for model in args.models:
            files = Files(MODELS[model], args.cache)
            contests[files.model.title] = measure(
                files, pythons, rows_of(files.model, args.rows), args.rounds, args.limit
            )
            # After each model, so that what is measured is kept.
            write(args, taken, contests)
    except StartupError as error:
        print(f"benchmarks.peers: error: {error}", file=sys.stderr)
        return 1
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for peer in ("openvino", "llamacpp", "vllm"):
        parser.add_argument(f"--{peer}", type=lambda path: str(Path(path).absolute()), default="", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=names_in(ROWS), help=f"of {','.join(ROWS)}")
    parser.add_argument("--models", type=names_in(MODELS), default=list(MODELS), help=f"of {','.join(MODELS)}")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help="streams are given up after so many times the fastest"
    )
    cache = Path("~/.cache/pagewire/peers").expanduser()
    parser.add_argument("--cache", type=lambda path: Path(path).absolute(), default=cache, help="of converted models")
    parser.add_argument("--out", type=Path, help="Markdown file")
    parser.add_argument("--json-out", type=Path, help="file with the figure of each round")
    bufts = "llama.cpp without weights repacked for this processor, where that build crashes"
    parser.add_argument("--no-extra-bufts", dest="use_extra_bufts", action="store_false", help=bufts)
    return parser


def names_in(known: Mapping[str, object]) -> Callable[[str], list[str]]:
    """Returns a parser of names separated by commas."""

    def parsed(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: none of {', '.join(known)}")
        return names

    return parsed


def rows_of(model: Model, names: Sequence[str] | None) -> list[Row]:
    """Returns the rows of a model, without those of texts if it was not trained. names: None for all but slow ones."""
    chosen = [name for name in ROWS if name not in model.slow_rows] if names is None else names
    return [ROWS[name] for name in chosen if model.is_trained or not ROWS[name].texts]


def measure(files: Files, pythons: Pythons, rows: Sequence[Row], rounds: int, limit: float) -> Contest:
    wanted = {row.key for row in rows}
    field = field_of(files, pythons, lambda key: bool(wanted & measured_by(key)))
    contest = Contest(field.contestants, field.left_out)
    tokenizer = AutoTokenizer.from_pretrained(files.checkpoint())

    async def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text))

    def chat(text: str) -> str:
        # A number that no prefix cache knows.
        system = {"role": "system", "content": f"{random.randrange(10**9)}: you are a helpful assistant."}
        prompt = [system, {"role": "user", "content": text}]
        return str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))

    words = asyncio.run(RandomWords.measured(None, COUNTED_LEN, count_tokens))
    with tempfile.TemporaryDirectory(prefix="pagewire-peers-") as logs:
        Runner(contest, words, chat, limit, Path(logs)).run(rows, rounds)
    return contest


def machine() -> str:
    """Returns the processor's name, the number of processors and the instructions that matter."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in cpuinfo)}
    told = [name for name in TOLD if name in values.get("flags", "").split()]
    where = f"family {values.get('cpu family')}, model {values.get('model')}"
    return f"{curves.machine()} ({where}; {', '.join(told)})"


def versions() -> dict[str, str]:
    """Returns Pagewire's version and commit; the titles of the others have theirs."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    return {"Pagewire": f"{pagewire.__version__} {commit}".strip(), "Python": sys.version.split()[0]}


def write(args: argparse.Namespace, taken: Taken, contests: Mapping[str, Contest]) -> None:
    """Prints the table, and writes the files that are wanted. Raises StartupError."""
    figures = {
        title: {
            "seconds": round(contest.seconds),
            "left_out": contest.left_out,
            "commands": {one.title: one.command for one in contest.contestants},
            "figures": [{"row": row, "contestant": key} | asdict(cell) for (row, key), cell in contest.cells.items()],
        }
        for title, contest in contests.items()
    }
    texts = {args.out: page(taken, contests), args.json_out: json.dumps(asdict(taken) | {"models": figures}, indent=1)}
    # Paths of this machine mean nothing elsewhere.
    names = {args.openvino: "PYTHON", args.llamacpp: "PYTHON", args.vllm: "PYTHON", str(args.cache): "CACHE"}
    names[str(Path.home())] = "~"
    for path, text in texts.items():
        for value, name in names.items():
            text = text.replace(value, name) if value else text
        try:
            if path:
                path.write_text(text.rstrip() + "\n")
        except OSError as error:
            raise StartupError(f"cannot write the table: {error}") from error
        if path == args.out:
            print(text)


if __name__ == "__main__":
    sys.exit(main())
