"""Finds the C++ kernels: in the wheel, else in the user's cache, else compiles them, once per machine.

A library's name covers everything that it depends on: sources, flags and, of a library in the cache, compiler and
processor. A changed machine or source therefore finds no library and compiles a new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagewire.kernels.backends import BuildError
from pagewire.kernels.cpu.runtime import variants
from pagewire.kernels.cpu.runtime.compiler import (
    FLAGS,
    LINK_FLAGS,
    NATIVE,
    SOURCE_DIR,
    Compiler,
    make_folder,
    sources,
)
from pagewire.kernels.cpu.runtime.seal import open_sealed

__all__ = ["SHIPPED_DIR", "Outlook", "cache_dir", "load_library", "outlook", "shipped_name"]

logger = logging.getLogger(__name__)

SHIPPED_DIR = Path(__file__).parents[1] / "shipped"  # exists in wheels only


def cache_dir() -> Path:
    """Returns where compiled kernels are kept: $PAGEWIRE_CACHE_DIR, else pagewire/ in the user's cache directory."""
    # pagewire.files.models has the same rule for models; `kernels` imports nothing of Pagewire's.
    if explicit := os.environ.get("PAGEWIRE_CACHE_DIR"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser() / "pagewire"


def shipped_name(variant: variants.Variant) -> str:
    """Returns the name of a wheel's file for these very sources."""
    return f"kernels-{variant.name}-{_digest(variant.flags)}.so"


@dataclass(frozen=True)
class Outlook:
    """The library that load_library() would load; None: it would compile one. compiler: the one that it would use, or
    of the library in the cache."""

    library: Path | None
    compiler: str = ""


def outlook() -> Outlook:
    """Returns what load_library() would do, without doing it. Raises BuildError if it certainly fails."""
    for path in _shipped():
        return Outlook(path)
    compiler = Compiler.find()
    path = _cached_path(compiler)
    return Outlook(path if path.exists() else None, str(compiler))


def load_library() -> ctypes.CDLL:
    """Returns the kernels; compiles them if the wheel and the cache have none that can be used. Raises BuildError."""
    for path in _shipped():
        try:
            library = open_sealed(path)
        except OSError as error:
            logger.warning("the CPU kernels of this installation cannot be used: %s; reinstall pagewire", error)
            continue
        logger.info("CPU kernels: %s", path.name)
        return library
    compiler = Compiler.find()
    path = _cached_path(compiler)
    return _cached(path) or _compiled(compiler, path)


def _shipped() -> Iterator[Path]:
    """Yields the libraries in the wheel that this processor runs, the fastest first."""
    if not SHIPPED_DIR.is_dir():
        return
    for variant in variants.suitable(variants.processor_flags()):
        if (path := SHIPPED_DIR / shipped_name(variant)).exists():
            yield path


def _compiled(compiler: Compiler, path: Path) -> ctypes.CDLL:
    make_folder(path.parent)
    with _only_one(path):
        if library := _cached(path):  # another process has compiled it meanwhile
            return library
        if path.exists():
            logger.warning("the compiled kernels %s are damaged or cannot be loaded; compiling them again", path)
        started = time.monotonic()
        logger.info("compiling the CPU kernels, once on this machine, in about a minute: %s", compiler)
        compiler.compile(NATIVE, path)
        logger.info("compiled the CPU kernels in %.0f s: %s", time.monotonic() - started, path)
    try:
        return open_sealed(path)
    except OSError as error:
        raise BuildError(
            f"the compiled kernels cannot be loaded: {error}", f"delete {path}, then start again"
        ) from error


def _cached(path: Path) -> ctypes.CDLL | None:
    try:
        return open_sealed(path)
    except OSError:
        return None


def _cached_path(compiler: Compiler) -> Path:
    digest = _digest([*NATIVE, *compiler.command, compiler.version, platform.machine(), _processor()])
    return cache_dir() / f"kernels-{digest}.so"


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Lets processes that start together compile once; if one dies, the next one compiles."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # file systems without locks: the last process replaces the others' library
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, folder)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting for another process, which compiles the CPU kernels")
                fcntl.flock(folder, fcntl.LOCK_EX)
        yield


def _digest(parts: Sequence[str]) -> str:
    """Returns a digest of the sources, the flags of all libraries and these parts."""
    digest = hashlib.sha256()
    for path in sorted([*sources(), *SOURCE_DIR.rglob("*.h")]):
        name = path.relative_to(SOURCE_DIR).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (*FLAGS, *LINK_FLAGS, *parts):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Returns the processor's properties that -march=native depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    lines = cpuinfo.read_text().partition("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.split("\t")[0].strip() in wanted)
