import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import pagewire

REPOSITORY = Path(__file__).parents[2]


def pagewire_command(*argv: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pagewire.cli", *argv],
        cwd=REPOSITORY,
        env={**os.environ, **environ},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_version() -> None:
    result = pagewire_command("--version")
    assert (result.returncode, result.stdout) == (0, f"pagewire {pagewire.__version__}\n")


def test_help_lists_every_command() -> None:
    result = pagewire_command("--help")
    assert result.returncode == 0
    for command in (
        "serve",
        "gateway",
        "tokenizer",
        "scheduler",
        "executor",
        "run",
        "pull",
        "list",
        "rm",
        "ps",
        "chat",
        "generate",
        "batch",
        "bench serve",
        "bench sweep",
        "bench spec",
    ):
        assert f"\n  {command} " in result.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "usage: pagewire <command>"),
        (["sevre"], "unknown command sevre; did you mean serve?"),
        (["serve", "--max-num-seq", "4"], "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        (["serve", "--listen", "x"], "unknown flag --listen"),
        (["gateway", "--port", "x"], "--port: expected a whole number"),
        (["bench"], "usage: pagewire bench <command>"),
        (["bench", "plott"], "usage: pagewire bench <command>"),
        (["bench", "sweep", "--concurrency", "1,x"], "--concurrency: expected whole numbers separated by commas"),
        (["bench", "plot"], "the following arguments are required: FILE"),
        (["bench", "serve", "--concurency", "3"], "did you mean --concurrency?"),
        (["chat", "hello"], "unexpected argument 'hello'"),
    ],
)
def test_wrong_usage_exits_with_2(argv: list[str], message: str) -> None:
    result = pagewire_command(*argv)
    assert result.returncode == 2
    assert message in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "hello", "--address", "127.0.0.1:1"], "nothing answers at 127.0.0.1:1"),
        (["chat", "--address", "127.0.0.1:1"], "start a stack with `pagewire serve`"),
        (["bench", "serve", "--base-url", "http://127.0.0.1:1"], "is the server running?"),
        (["bench", "sweep", "--base-url", "http://127.0.0.1:1"], "is the server running?"),
        (["bench", "spec", "--methods", ","], "--methods: nothing to compare"),
        (["bench", "plot", "no-such.json"], "no-such.json: cannot be read as JSON"),
        (["bench", "serve", "--base-url", "ftp://x"], "--base-url: expected http://host:port"),
        (["scheduler", "--listen", "unix:/no/such/folder/x.sock"], "cannot listen on unix:/no/such/folder/x.sock"),
    ],
)
def test_failures_exit_with_1_and_say_why(argv: list[str], message: str) -> None:
    result = pagewire_command(*argv)
    assert result.returncode == 1
    assert message in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("model", ["no-such-model", "/no/such.gguf"])
def test_serve_refuses_a_wrong_model_as_wrong_usage(model: str) -> None:
    result = pagewire_command("serve", model, "--port=0")
    assert result.returncode == 2
    assert f"--model: no model '{model}'" in result.stderr and "Traceback" not in result.stderr


def test_serve_refuses_a_port_in_use(smollm2_gguf: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = pagewire_command("serve", str(smollm2_gguf), f"--port={port}", "--grpc-port=0")
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr and "--port" in result.stderr


def test_a_public_port_in_use_is_reported_without_a_traceback(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = pagewire_command("scheduler", f"--listen=unix:{tmp_path}/s", f"--public-listen={address}")
    assert result.returncode == 1
    assert f"cannot listen on {address}" in result.stderr and "Traceback" not in result.stderr


def test_a_reader_that_leaves_is_no_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "pagewire.cli", "--help"], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
