"""Measures start to first token by model size: `python -m benchmarks.start [--json-out FILE]`.

Llama models of several sizes with random weights are served by a fresh `pagewire serve --load-format dummy`, or by the
server of --command, which must name the model "bench". The clock starts before the command and stops with the first
token through HTTP. Drawing random weights takes other time than reading a checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.curves.output import CurveOutput
from benchmarks.gpu.engine.models import BenchModel
from pagewire.flags.ports import available_port
from pagewire.tools.bench.config import ServerFlags
from pagewire.tools.bench.curves import Point
from pagewire.tools.bench.http import Connection
from pagewire.tools.bench.request import body, send

SERVED_NAME = "bench"
COMMAND = (
    "{python} -m pagewire.cli serve {model} --load-format dummy --port {port} --grpc-port 0"
    f" --served-model-name {SERVED_NAME}"
)
POLL_S = 0.02
STOP_TIMEOUT_S = 30

# name -> layers, hidden size, intermediate size, heads, KV heads
SHAPES = {
    "10M": (4, 192, 512, 3, 1),
    "135M": (30, 576, 1536, 9, 3),
    "360M": (32, 960, 2560, 15, 5),
    "1B": (16, 2048, 8192, 32, 8),
    "2B": (28, 2048, 11008, 16, 2),
}
VOCAB_SIZE = 49_152


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--command", default=COMMAND, help="server to start; {model} and {port} are filled in")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a server may take")
    output = CurveOutput(parser, "Pagewire")
    points: list[Point] = []
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as directory:
        for name in output.args.sizes:
            model = bench_model(name)
            seconds = start_seconds(model.write(Path(directory, name)), output.args.command, output.args.timeout)
            print(f"{name:>6}{model.num_weights / 1e6:>8.0f} M{seconds:>8.2f} s", flush=True)
            points.append({"parameters": model.num_weights, "start_s": seconds})
            output.put("model-size", "Llama with random weights", points)


def bench_model(name: str) -> BenchModel:
    layers, hidden_size, intermediate_size, heads, kv_heads = SHAPES[name]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return BenchModel(name, config)


def start_seconds(model: Path, command: str, timeout: float) -> float:
    """Ends the server before it returns, and the process if there is no token."""
    port = available_port("127.0.0.1")
    argv = shlex.split(command.format(python=sys.executable, model=model, port=port))
    log = model / "serve.log"
    with log.open("wb") as file:
        started = time.perf_counter()
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    try:
        if problem := asyncio.run(no_token(process, f"http://127.0.0.1:{port}", timeout)):
            raise SystemExit(f"the server gave no token ({problem}):\n{log.read_text(errors='replace')[-2000:]}")
        return time.perf_counter() - started
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def no_token(process: subprocess.Popen[bytes], url: str, timeout: float) -> str | None:
    """Returns with the first token, or says why there will be none."""
    deadline = time.monotonic() + timeout
    connection, flags = Connection(url, {}), ServerFlags()
    request = body(flags, SERVED_NAME, "w1 w2", 1)
    while (record := await send(connection, flags.endpoint, request, timeout)).error is not None:
        if process.poll() is not None or time.monotonic() > deadline:
            return record.error
        await asyncio.sleep(POLL_S)
    connection.close()
    return None


if __name__ == "__main__":
    main()
