"""`pagewire run` with the real model, without a server."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pagewire.config import ServeConfig
from pagewire.errors import StartupError
from pagewire.stack.own_stack import OwnStack
from tests.e2e.line import REPOSITORY

# Few sizes of steps, which an idle executor records.
SMALL = ["--max-model-len=512", "--kv-cache-memory-bytes=64MiB", "--max-num-seqs=4", "--max-num-batched-tokens=64"]


def run(*argv: str, stdin: str | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pagewire", "run", *argv],
        cwd=REPOSITORY,
        **({"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}),  # type: ignore[call-overload]
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_prompt_and_a_pipe_are_answered(smollm2_gguf: Path) -> None:
    result = run(
        str(smollm2_gguf), "Answer in one sentence:", "--temperature=0", *SMALL, stdin="What is the capital of France?"
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "Paris" in result.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "nothing to answer"),
        (["--temperature=x"], "--temperature: expected a number"),
        (["hello", "--block-size=24"], "a power of two"),
    ],
)
def test_wrong_usage_is_said_at_once(smollm2_gguf: Path, argv: list[str], message: str) -> None:
    result = run(str(smollm2_gguf), *argv, stdin=None)
    assert result.returncode in (1, 2) and message in result.stderr and "Traceback" not in result.stderr


_PROGRAM = """
import os, sys, time
from pagewire.config import ServeConfig
from pagewire.stack.own_stack import OwnStack
stack = OwnStack(ServeConfig(model=sys.argv[1], port=0, grpc_port=0, max_model_len=512, max_num_seqs=4))
fork = os.fork()
if not fork:  # it has the files of the program, and lives on
    time.sleep(300)
if sys.argv[2] == "ready":
    stack.await_ready()
print(stack.pid, fork, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("when", ["ready", "loading"])
def test_no_orphan_when_the_program_is_killed(quick_model: Path, when: str) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(quick_model), when]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        stack, fork = (psutil.Process(int(pid)) for pid in program.stdout.readline().split())
        processes = [stack, *stack.children(recursive=True)]
        assert len(processes) >= 5 or when == "loading"
        program.kill()
        _, alive = psutil.wait_procs(processes, timeout=30)
        fork.kill()
    assert not alive


def test_a_stack_that_cannot_start_says_why() -> None:
    stack = OwnStack(ServeConfig(model="/no/such/model", port=0, grpc_port=0))
    with pytest.raises(StartupError, match="no model '/no/such/model'"):
        stack.await_ready()
