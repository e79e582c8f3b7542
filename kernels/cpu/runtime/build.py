"""Compiles the C++ kernels once per machine and loads them.

The library is in the user's cache under a name that covers everything it depends on: sources, flags, compiler and
processor. A changed machine or source therefore finds no library and compiles a new one (a minute of a core or two).
It ends with a digest of itself, because a library that was cut short would be loaded, and end the process when used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["BuildError", "cache_dir", "load_library"]

logger = logging.getLogger(__name__)

_SOURCE_DIR = Path(__file__).parents[1] / "csrc"
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-ffp-contract=fast",
    "-pthread",
    "-fPIC",
    "-Wno-psabi",
)
# Headers are included by their paths below the sources. This is not among the flags, which are part of the name.
_INCLUDE = f"-I{_SOURCE_DIR}"
_LINK_FLAGS = ("-shared", "-pthread")
_COMPILE_TIMEOUT_S = 900  # a minute of work, on cores that may be busy otherwise
# The library in its file is followed by this and its SHA-256.
_SEAL = b"pagewire kernels\0"
_MAX_JOBS = 8  # compilers at a time: each takes some 300 MB


class BuildError(RuntimeError):
    """The C++ kernels cannot be compiled or loaded here; the message names the cause and the remedy."""


def cache_dir() -> Path:
    """Returns where compiled kernels are kept: $PAGEWIRE_CACHE_DIR, else pagewire/ in the user's cache directory."""
    # pagewire.files.models has the same rule for models; `kernels` imports nothing of Pagewire's.
    if explicit := os.environ.get("PAGEWIRE_CACHE_DIR"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser() / "pagewire"


def load_library() -> ctypes.CDLL:
    """Returns the compiled kernels, from the cache if it holds a usable library. Raises BuildError."""
    compiler = _compiler()
    path = cache_dir() / f"kernels-{_fingerprint(compiler)}.so"
    if library := _cached(path):
        return library
    _make_folder(path.parent)
    with _only_one(path):
        if library := _cached(path):  # another process has compiled it meanwhile
            return library
        if path.exists():
            logger.warning("the compiled kernels %s are damaged or cannot be loaded; compiling them again", path)
        _compile(compiler, path)
    try:
        return _open(path)
    except OSError as error:
        raise BuildError(
            f"the compiled kernels cannot be loaded: {error}; delete {path} to compile them again"
        ) from error


def _cached(path: Path) -> ctypes.CDLL | None:
    try:
        return _open(path) if _is_sealed(path.read_bytes()) else None
    except OSError:
        return None


def _open(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def _sealed(library: bytes) -> bytes:
    return library + _SEAL + hashlib.sha256(library).digest()


def _is_sealed(content: bytes) -> bool:
    library = content[: -len(_SEAL) - hashlib.sha256().digest_size]
    return content == _sealed(library)


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Lets processes that start together compile once; if one dies, the next one compiles."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # file systems without locks: the last process replaces the others' library
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "g++"))
    if not command or shutil.which(command[0]) is None:
        raise BuildError(f"no C++ compiler ({shlex.join(command)} not found): install g++ or set CXX")
    return command


def _sources() -> list[Path]:
    return sorted(_SOURCE_DIR.rglob("*.cpp"))


def _fingerprint(compiler: list[str]) -> str:
    digest = hashlib.sha256(_SEAL)
    for path in sorted([*_sources(), *_SOURCE_DIR.rglob("*.h")]):
        name = path.relative_to(_SOURCE_DIR).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    for part in (*_FLAGS, *_LINK_FLAGS, *compiler, version, platform.machine(), _processor()):
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


def _compile(compiler: list[str], path: Path) -> None:
    """Compiles next to `path` and renames: concurrent processes never see a partial library."""
    _make_folder(path.parent)
    try:
        folder = tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent)
    except OSError as error:
        raise _cannot_write(path.parent, error) from error
    logger.info("compiling the CPU kernels (once per machine): %s", shlex.join([*compiler, *_FLAGS]))
    started = time.monotonic()
    with folder as name:
        objects = _compile_objects(compiler, Path(name), started + _COMPILE_TIMEOUT_S)
        library = Path(name) / path.name
        _run([*compiler, *_LINK_FLAGS, *map(str, objects), "-o", str(library)], started + _COMPILE_TIMEOUT_S)
        try:
            library.write_bytes(_sealed(library.read_bytes()))
            library.replace(path)
        except OSError as error:
            raise _cannot_write(path.parent, error) from error
    logger.info("compiled the CPU kernels in %.1f s: %s", time.monotonic() - started, path)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error) from error


def _cannot_write(folder: Path, error: OSError) -> BuildError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _disk_full(folder)
    return BuildError(f"cannot write to {folder}: {error}; set PAGEWIRE_CACHE_DIR to a writable folder")


def _disk_full(folder: Path) -> BuildError:
    return BuildError(
        f"no space is left on the disk of {folder}, which keeps the compiled kernels: free 100 MB there, or set"
        " PAGEWIRE_CACHE_DIR to a folder on another disk"
    )


def _compile_objects(compiler: list[str], folder: Path, deadline: float) -> list[Path]:
    """Compiles an object file per source, several at a time, the slowest first."""
    sources = sorted(_sources(), key=lambda path: path.stat().st_size, reverse=True)
    objects = [folder / f"{'-'.join(source.relative_to(_SOURCE_DIR).parts)}.o" for source in sources]
    commands = [
        [*compiler, *_FLAGS, _INCLUDE, "-c", str(source), "-o", str(result)]
        for source, result in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(min(_MAX_JOBS, len(os.sched_getaffinity(0)))) as pool:
        jobs = [pool.submit(_run, command, deadline) for command in commands]
        try:
            for job in jobs:
                job.result()
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise
    return objects


def _run(command: list[str], deadline: float) -> None:
    """deadline: of time.monotonic()"""
    try:
        timeout = max(0.0, deadline - time.monotonic())
        # The compiler's temporary files are next to its output, so that only one disk can be full.
        folder = Path(command[-1]).parent
        environment = {**os.environ, "TMPDIR": str(folder)}
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=timeout, env=environment)
    except subprocess.CalledProcessError as error:
        if os.strerror(errno.ENOSPC) in error.stderr or os.strerror(errno.EDQUOT) in error.stderr:
            raise _disk_full(folder.parent) from error
        raise BuildError(f"{command[0]} failed:\n{error.stderr[-2000:]}") from error
    except (subprocess.TimeoutExpired, OSError) as error:
        raise BuildError(f"{command[0]} did not finish: {error}") from error
