"""Runs the clients of this folder against a stack on this machine; see README.md."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.e2e.line import free_port

HERE = Path(__file__).parent
LLAMAINDEX = [f"llama-index-{name}" for name in ("core", "llms-openai", "llms-openai-like")]
LLAMAINDEX += [f"llama-index-embeddings-{name}" for name in ("openai", "openai-like")]
# name -> script and packages
PYTHON = {
    "openai": ("official.py", ["openai"]),
    "langchain": ("langchain.py", ["langchain-openai"]),
    "llamaindex": ("llamaindex.py", LLAMAINDEX),
    "litellm": ("others.py", ["litellm", "mcp"]),
    "instructor": ("others.py", ["instructor"]),
    "pydantic-ai": ("others.py", ["pydantic-ai-slim[openai]"]),
    "anthropic": ("others.py", ["anthropic"]),
    "ollama": ("local.py", ["ollama"]),
    "ollama-langchain": ("local.py", ["langchain-ollama"]),
    "ollama-llamaindex": ("local.py", [f"llama-index-{name}-ollama" for name in ("llms", "embeddings")]),
    "ollama-litellm": ("local.py", ["litellm"]),
    "tgi": ("local.py", ["huggingface_hub", "pydantic"]),
    "agents": ("agents.py", ["openai-agents"]),
    "schemathesis": ("fuzz.py", ["schemathesis"]),
}
NODE = {
    "ai": ("ai_sdk.mjs", ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"]),
    "ollama-js": ("ollama.mjs", ["ollama"]),
}
START_TIMEOUT_S = 120


@contextmanager
def server(arguments: Sequence[str]) -> Iterator[str]:
    """Runs a module that listens on the port after the arguments, and yields its base URL."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(arguments)} does not start: run it by hand to see why")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def _ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def run_client(name: str, folder: Path, environment: Mapping[str, str]) -> bool:
    """Installs what it needs into `folder`, unless it is there, and runs it."""
    if name in PYTHON:
        script, packages = PYTHON[name]
        python = folder / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        command = [str(python), str(HERE / script)]
    else:
        script, packages = NODE[name]
        if not (folder / "node_modules").exists():
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run(["npm", "install", "--prefix", folder, "--no-audit", "--no-fund", *packages], check=True)
        command = ["node", str(HERE / script)]
    return subprocess.run(command, cwd=folder, env={**os.environ, **environment}).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("folder", type=Path, help="where clients are installed, or are already")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join([*PYTHON, *NODE])}; default: all")
    arguments = parser.parse_args()
    serve = ["pagewire.cli", "serve", "--grpc-port"]
    names = "smollm2-135m-instruct,gpt-4o-mini"
    with ExitStack() as stack:
        urls = {
            "CHAT": [*serve, str(free_port()), "--served-model-name", names, "--max-model-len", "4096", "--port"],
            "EMBED": [*serve, str(free_port()), "all-minilm-l6-v2", "--port"],
            "SCRIPTED": ["tests.clients.scripted"],
        }
        environment = {f"PAGEWIRE_{name}": stack.enter_context(server(started)) for name, started in urls.items()}
        environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        clients = arguments.clients or [*PYTHON, *NODE]
        failed = [name for name in clients if not run_client(name, arguments.folder.resolve() / name, environment)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
