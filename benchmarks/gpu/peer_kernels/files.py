"""Loads other people's kernels from `peers/`, where `fetch.py` puts them; says why if that fails."""

from __future__ import annotations

import functools
import importlib
import lzma
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PEERS = Path(__file__).parents[1] / "peers"
# Each in a folder of its own, as not all of them fit into one call of a machine.
FA3, VLLM, GEMLITE = "fa3", "marlin", "gemlite"
FA3_FILE = "_vllm_fa3_C.abi3.so"
VLLM_FILE = "_C.abi3.so"

_FETCH = "run python -m benchmarks.gpu.peer_kernels.fetch"


class PeerMissingError(Exception):
    """A peer cannot be run here; the message says why."""


@functools.cache
def fa3() -> Any:
    """Returns the torch.ops namespace of FlashAttention 3. Raises PeerMissingError."""
    return _library("FlashAttention 3", FA3, FA3_FILE)._vllm_fa3_C


@functools.cache
def vllm() -> Any:
    """Returns the torch.ops namespace of vLLM's kernels; Marlin and Machete are among them. Raises PeerMissingError."""
    return _library("vLLM's library", VLLM, VLLM_FILE)._C


def _library(name: str, folder: str, file: str) -> Any:
    packed = PEERS / folder / f"{file}.xz"
    if not packed.exists():
        raise PeerMissingError(f"no {packed.name} in benchmarks/gpu/peers/{folder}: {_FETCH}")
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
def gemlite() -> ModuleType:
    """The package, with the configurations that it ships for the H100. Raises PeerMissingError."""
    packed = next(iter((PEERS / GEMLITE).glob("gemlite-*.tar.gz")), None)
    if packed is None:
        raise PeerMissingError(f"no gemlite-*.tar.gz in benchmarks/gpu/peers/{GEMLITE}: {_FETCH}")
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
