"""Loads other people's kernels from `peers/`, where `fetch.py` puts them; says why if that fails."""

from __future__ import annotations

import functools
import importlib
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PEERS = Path(__file__).parents[1] / "peers"
FA3_FILE = "_vllm_fa3_C.abi3.so"
VLLM_FILE = "_C.abi3.so"

_FETCH = "run python -m benchmarks.gpu.peer_kernels.fetch"

_BUILD_TIMEOUT_S = 180.0


class PeerMissingError(Exception):
    """A peer cannot be run here; the message says why."""


@functools.cache
def fa3() -> Any:
    """Returns the torch.ops namespace of FlashAttention 3. Raises PeerMissingError."""
    return _library("FlashAttention 3", FA3_FILE)._vllm_fa3_C


@functools.cache
def vllm() -> Any:
    """Returns the torch.ops namespace of vLLM's kernels; Marlin and Machete are among them. Raises PeerMissingError."""
    return _library("vLLM's library", VLLM_FILE)._C


def _library(name: str, file: str) -> Any:
    packed = PEERS / f"{file}.xz"
    if not packed.exists():
        raise PeerMissingError(f"no {packed.name} in benchmarks/gpu/peers: {_FETCH}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise PeerMissingError(f"{name} is run on Hopper GPUs only")
    library = _unpacked() / file
    if not library.exists() or library.stat().st_mtime < packed.stat().st_mtime:
        # Another process may have mapped the old one, or be as far as this one.
        with lzma.open(packed) as source, tempfile.NamedTemporaryFile(dir=_unpacked(), delete=False) as target:
            shutil.copyfileobj(source, target, 4 << 20)
        Path(target.name).rename(library)
    try:
        # torch has mapped the CUDA runtime that the library asks for.
        torch.ops.load_library(library)
    except OSError as error:
        raise PeerMissingError(f"{name} does not load with torch {torch.__version__}: {error}") from error
    return torch.ops


@functools.cache
def _unpacked() -> Path:
    directory = Path(tempfile.gettempdir()) / "pagewire-peers"
    directory.mkdir(exist_ok=True)
    return directory


@functools.cache
def flashinfer() -> ModuleType:
    """The package. Raises PeerMissingError. What it compiles stays in a temporary directory of this machine."""
    wheels = sorted(PEERS.glob("*.whl"))
    if not wheels:
        raise PeerMissingError(f"no wheels in benchmarks/gpu/peers: {_FETCH}")
    # ninja from PyPI lies beside the interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if shutil.which("nvcc") is None or shutil.which("ninja") is None:
        raise PeerMissingError("FlashInfer compiles its kernels: nvcc and ninja must be on the PATH")
    directory = _unpacked() / "site"
    if not directory.exists():
        partial = Path(tempfile.mkdtemp(dir=_unpacked()))
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(partial)
        partial.rename(directory)
    major, minor = torch.cuda.get_device_capability()
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(_unpacked()))
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{'a' if major >= 9 else ''}")
    sys.path.append(str(directory))
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise PeerMissingError(f"FlashInfer does not import: {error}") from error


@functools.cache
def gemlite() -> ModuleType:
    """The package, with the configurations that it ships for the H100. Raises PeerMissingError."""
    packed = next(iter(PEERS.glob("gemlite-*.tar.gz")), None)
    if packed is None:
        raise PeerMissingError(f"no gemlite-*.tar.gz in benchmarks/gpu/peers: {_FETCH}")
    if not torch.cuda.is_available():
        raise PeerMissingError("GemLite needs a GPU")
    directory = _unpacked() / packed.name.removesuffix(".tar.gz")
    if not directory.exists():
        partial = Path(tempfile.mkdtemp(dir=_unpacked()))
        with tarfile.open(packed) as archive:
            archive.extractall(partial, filter="data")
        try:
            (partial / directory.name).rename(directory)
        except OSError:  # a process that compiles beside this one was faster
            shutil.rmtree(partial)
    sys.path.append(str(directory))
    try:
        package = importlib.import_module("gemlite")
    except ImportError as error:
        raise PeerMissingError(f"GemLite does not import: {error}") from error
    if not package.load_config(str(directory / "gemlite" / "configs" / "h100.json")):
        raise PeerMissingError("GemLite has no configurations for the H100")
    return package


class FlashInferBuild:
    """Compiles FlashInfer's kernels in processes of their own, while this one measures what needs none of them."""

    def __init__(self) -> None:
        flashinfer()  # unpacked once, and known to import
        self._log = (_unpacked() / "build.log").open("wb")
        self._started = time.monotonic()
        self._processes = {
            name: subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.peer_kernels.attention", name],
                stdout=self._log,
                stderr=self._log,
            )
            for name in ("decode", "prefill", "sampling")
        }

    def wait(self, name: str) -> None:
        """Raises PeerMissingError if that kernel could not be built."""
        process = self._processes[name]
        try:
            code = process.wait(max(0.0, self._started + _BUILD_TIMEOUT_S - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise PeerMissingError(
                f"FlashInfer's {name} kernels took over {_BUILD_TIMEOUT_S:.0f} s to build"
            ) from error
        if code:
            log = Path(self._log.name).read_text(errors="replace")[-400:]
            raise PeerMissingError(f"FlashInfer's {name} kernels do not build: {log}")
