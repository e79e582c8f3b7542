"""The contestants of `python -m benchmarks.peers`, each in a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.engines.worker import Times, Work
from benchmarks.peers.models import RANK, REPOSITORY, Files
from benchmarks.peers.rows import HTTP, PREFIXES
from pagewire.errors import StartupError
from pagewire.process.process import usable_cores

ENGINES = "benchmarks.peers.engines"
STOP_TIMEOUT_S = 40
# For the longest: the start of a large model, or the slowest load without a limit of its own.
ANSWER_TIMEOUT_S = 900.0
MAX_NUM_SEQS = 64
MAX_MODEL_LEN = 4096
MAX_NUM_BATCHED_TOKENS = 2048
KV_CACHE_GIB = 3
SHOWN_LOG = 1500
BF16 = ("--quantization", "none")
# Engines without drafts are compared with ours without drafts.
PLAIN = ("--spec-method", "none")


@dataclass(frozen=True)
class Contestant:
    """An engine with a model. argv: its process; settings: the first line to it; command: as the table names it."""

    key: str
    title: str
    argv: Sequence[str]
    settings: dict[str, Any]
    command: str
    can: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Pythons:
    """The Python of each peer's environment; "": that peer is left out."""

    openvino: str = ""
    llamacpp: str = ""
    vllm: str = ""
    use_extra_bufts: bool = True


@dataclass
class Field:
    """The contestants that take part, and why others do not, by title."""

    contestants: list[Contestant] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, title: str, make: Callable[[], Contestant]) -> None:
        try:
            self.contestants.append(make())
        except StartupError as error:
            self.left_out[title] = str(error)


def field_of(files: Files, pythons: Pythons, wanted: Callable[[str], bool]) -> Field:
    """Returns the contestants for a model, neighbors in turn being different engines. wanted: by key."""

    def ours(
        title: str, key: str, model: Callable[[], str | Path], *flags: str
    ) -> tuple[str, Callable[[], Contestant]]:
        return title, lambda: pagewire(title, key, model(), *flags)

    def q4_1() -> str | Path:
        return files.model.stored or files.gguf("Q4_1", pythons.llamacpp)

    makers: dict[str, tuple[str, Callable[[], Contestant]]] = {
        "pagewire-bf16": ours("Pagewire bf16", "pagewire-bf16", files.checkpoint, *BF16, *PLAIN),
        "openvino": ("OpenVINO GenAI", lambda: openvino(files, pythons)),
        "vllm": ("vLLM", lambda: vllm(files, pythons)),
        "llamacpp": ("llama.cpp bf16", lambda: llamacpp(files, pythons, "llamacpp", "BF16")),
        "pagewire": ours("Pagewire 4 bits", "pagewire", q4_1, *PLAIN),
        "llamacpp-q4_0": ("llama.cpp Q4_0", lambda: llamacpp(files, pythons, "llamacpp-q4_0", "Q4_0")),
        "llamacpp-q4_1": ("llama.cpp Q4_1", lambda: llamacpp(files, pythons, "llamacpp-q4_1", "Q4_1")),
        "pagewire-default": ours("Pagewire, default flags", "pagewire-default", q4_1),
        "pagewire-lora": ("Pagewire bf16, adapters", lambda: pagewire_lora(files)),
        "vllm-lora": ("vLLM, adapters", lambda: vllm(files, pythons, with_adapters=True)),
    }
    made = Field()
    for key, (title, make) in makers.items():
        if wanted(key):
            made.add(title, make)
    return made


def pagewire_lora(files: Files) -> Contestant:
    adapters = files.adapters()
    flags = [*BF16, *PLAIN, *_lora_flags(len(adapters)), "--lora-modules", *(f"{one.name}={one}" for one in adapters)]
    return pagewire("Pagewire bf16, adapters", "pagewire-lora", files.checkpoint(), *flags, adapters=adapters)


def _lora_flags(count: int) -> list[str]:
    return ["--enable-lora", "--max-loras", str(count), "--max-lora-rank", str(RANK)]


def pagewire(title: str, key: str, model: str | Path, *flags: str, adapters: Sequence[Path] = ()) -> Contestant:
    command = ["serve", str(model), *flags, "--host", "127.0.0.1", "--port", "{port}", "--grpc-port", "0"]
    command += ["--served-model-name", "bench", "--log-level", "warning"]
    argv = [sys.executable, "-P", "-m", "pagewire.cli", *command]
    return _server(key, title, argv, {}, shlex.join(["pagewire", *command]), adapters)


def vllm(files: Files, pythons: Pythons, *, with_adapters: bool = False) -> Contestant:
    version = _version(pythons.vllm, "--vllm", "vllm")
    cores = sorted(os.sched_getaffinity(0))
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "HF_HUB_OFFLINE": "1",
    }
    command = ["serve", str(files.checkpoint()), "--served-model-name", "bench", "--dtype", "bfloat16"]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]
    command += ["--host", "127.0.0.1", "--port", "{port}", "--disable-log-stats", "--disable-uvicorn-access-log"]
    adapters = files.adapters() if with_adapters else []
    if adapters:
        command += [*_lora_flags(len(adapters)), "--lora-modules", *(f"{one.name}={one}" for one in adapters)]
    shown = " ".join([*(f"{name}={value}" for name, value in env.items()), shlex.join(["vllm", *command])])
    key, title = ("vllm-lora", f"vLLM {version}, adapters") if adapters else ("vllm", f"vLLM {version}")
    return _server(key, title, [str(Path(pythons.vllm).parent / "vllm"), *command], env, shown, adapters)


def _server(
    key: str, title: str, command: Sequence[str], env: dict[str, str], shown: str, adapters: Sequence[Path] = ()
) -> Contestant:
    argv, names = [sys.executable, "-m", f"{ENGINES}.server"], [one.name for one in adapters]
    settings = {"command": command, "env": env, "adapters": names}
    return Contestant(key, title, argv, settings, shown, frozenset([HTTP, PREFIXES]))


def openvino(files: Files, pythons: Pythons) -> Contestant:
    version = _version(pythons.openvino, "--openvino", "openvino-genai")
    settings = {
        "model": str(files.openvino(pythons.openvino)),
        "threads": usable_cores(),
        "kv_cache_gib": KV_CACHE_GIB,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
    }
    title = f"OpenVINO GenAI {version}"
    return _in_process("openvino", title, pythons.openvino, "openvino", settings, frozenset([PREFIXES]))


def llamacpp(files: Files, pythons: Pythons, key: str, kind: str) -> Contestant:
    version = _version(pythons.llamacpp, "--llamacpp", "llama-cpp-python")
    settings = {
        "model": str(files.gguf(kind, pythons.llamacpp)),
        "threads": usable_cores(),
        "use_extra_bufts": pythons.use_extra_bufts,
    }
    return _in_process(key, f"llama.cpp {version} {kind}", pythons.llamacpp, "llamacpp", settings, frozenset())


def _in_process(
    key: str, title: str, python: str, engine: str, settings: dict[str, Any], can: frozenset[str]
) -> Contestant:
    shown = f"python -m {ENGINES}.{engine} <<< {shlex.quote(json.dumps(settings))}"
    return Contestant(key, title, [python, "-m", f"{ENGINES}.{engine}"], settings, shown, can)


def _version(python: str, flag: str, package: str) -> str:
    """Returns the version of a package in an environment. Raises StartupError if it has none."""
    if not python:
        raise StartupError(f"no {flag} PYTHON")
    code = f"from importlib.metadata import version; print(version({package!r}))"
    try:
        return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise StartupError(f"{flag} {python}: no package {package} there ({error})") from error


class ContestantError(Exception):
    """Raised when a contestant cannot go on; its message has the end of its log."""


class Process:
    """A contestant that runs. It starts at once; call `await_ready()` before use and `close()` afterwards."""

    def __init__(self, contestant: Contestant, log: Path, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """timeout_s: of an answer, after which the process is ended."""
        self.contestant = contestant
        self._log = log
        self._timeout_s = timeout_s
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                contestant.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                cwd=REPOSITORY,
                text=True,
                start_new_session=True,
            )

    def await_ready(self) -> None:
        """Waits until the engine has its model. Raises ContestantError."""
        self._ask(self.contestant.settings)

    def run(self, work: Work) -> list[Times] | None:
        """Returns the times of the requests; None if they did not end within limit_s. Raises ContestantError."""
        answer = self._ask(vars(work))
        return [Times(*one) for one in answer["requests"]] if "requests" in answer else None

    def close(self) -> None:
        """Ends the process and what it started. Safe to call twice."""
        with suppress(BrokenPipeError):
            self._pipes()[0].close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        self._kill()
        self._process.wait()
        self._pipes()[1].close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a message. Raises ContestantError for none in time, and for an error."""
        written, read = self._pipes()
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self._kill()

        timer = threading.Timer(self._timeout_s, give_up)
        timer.start()
        try:
            with suppress(BrokenPipeError):
                print(json.dumps(message), file=written, flush=True)
            line = read.readline()
        finally:
            timer.cancel()
        late = f"it gave no answer within {self._timeout_s:g} s and was ended"
        answer: dict[str, Any] = json.loads(line) if line else {"error": late if is_late.is_set() else "it ended"}
        if "error" in answer:
            end = self._log.read_text(errors="replace")[-SHOWN_LOG:]
            raise ContestantError(f"{answer['error']}\n{end}")
        return answer

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _pipes(self) -> tuple[Any, Any]:
        return self._process.stdin, self._process.stdout
