"""The C++ compiler of this machine, and how it compiles the kernels. The library takes plain pointers: it depends on
neither torch nor Python."""

from __future__ import annotations

import errno
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pagewire.kernels.backends import BuildError
from pagewire.kernels.cpu.runtime.seal import seal

__all__ = ["Compiler", "make_folder", "sources"]

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parents[1] / "csrc"
FLAGS = (
    "-O3",
    "-std=c++17",
    "-ffp-contract=fast",
    "-pthread",
    "-fPIC",
    "-Wno-psabi",
)
NATIVE = ("-march=native",)
# Headers are included by their paths below the sources. A library's name does not depend on it, unlike on the flags.
INCLUDE = f"-I{SOURCE_DIR}"
LINK_FLAGS = ("-shared", "-pthread")
# Takes as long as a quarter of all units: other compilers take the others meanwhile.
SLOWEST = "grouped/grouped_linear.cpp"
_TIMEOUT_S = 900  # half a minute of work, on cores that may be busy otherwise
_PREFIX = ".kernels-"  # of the folders of builds
_REPORT_EVERY_S = 5.0
_MAX_JOBS = 8  # compilers at a time: each takes some 300 MB
_OLDEST_GCC = 12  # knows __builtin_shufflevector


def sources() -> list[Path]:
    """Returns the units, in the order in which they are compiled: small ones early, which shows progress."""
    return sorted(SOURCE_DIR.rglob("*.cpp"), key=lambda path: (path != SOURCE_DIR / SLOWEST, path.stat().st_size, path))


def make_folder(folder: Path) -> None:
    """Raises BuildError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error) from error


@dataclass(frozen=True)
class Compiler:
    """A compiler that starts. version: the text of --version."""

    command: tuple[str, ...]
    version: str

    @classmethod
    def find(cls) -> Compiler:
        """Returns the compiler of CXX, else g++. Raises BuildError if there is none, or it is too old."""
        given = os.environ.get("CXX") or "g++"
        try:
            command = shlex.split(given)
        except ValueError as error:
            raise BuildError(f"CXX={given!r} is not a command ({error})") from error
        if not command or shutil.which(command[0]) is None:
            raise BuildError(f"no C++ compiler ({given} not found)")
        try:
            asked = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"the C++ compiler {given} does not start ({error})") from error
        gcc = re.match(r".*\(.*\) (\d+)\.\d+", asked.stdout) if "Free Software Foundation" in asked.stdout else None
        if gcc and int(gcc[1]) < _OLDEST_GCC:
            raise BuildError(f"the C++ compiler {given} is version {gcc[1]}, too old for the kernels")
        return cls(tuple(command), asked.stdout)

    def __str__(self) -> str:
        return self.version.partition("\n")[0] or shlex.join(self.command)

    def compile(self, flags: Sequence[str], path: Path) -> None:
        """Compiles a library with these flags besides FLAGS. `path` appears once it is complete.

        Logs the progress. Raises BuildError.
        """
        make_folder(path.parent)
        _remove_abandoned(path.parent)
        try:
            folder = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=path.parent, ignore_cleanup_errors=True)
        except OSError as error:
            raise _cannot_write(path.parent, error) from error
        with folder as name:
            build = _Build(
                [*self.command, *FLAGS, *flags, INCLUDE],
                [*self.command, *LINK_FLAGS],
                Path(name),
                time.monotonic() + _TIMEOUT_S,
            )
            build.run(path)


class _Build:
    """One build, in a folder of its own."""

    def __init__(self, command: Sequence[str], link: Sequence[str], folder: Path, deadline: float) -> None:
        """deadline: of time.monotonic()"""
        self._command, self._link = command, link
        self._folder, self._deadline = folder, deadline

    def run(self, path: Path) -> None:
        objects = self._compile(self._shared_headers())
        library = self._folder / path.name
        self._call([*self._link, *objects, "-o", str(library)])
        try:
            seal(library)
            library.replace(path)
        except OSError as error:
            raise _cannot_write(path.parent, error) from error

    def _shared_headers(self) -> Path:
        """Compiles the headers that most units share: reading them takes a fifth of the time."""
        shared = self._folder / "shared.h"
        names = sorted(path.name for path in (SOURCE_DIR / "common").glob("*.h"))
        try:
            shared.write_text("".join(f'#include "common/{name}"\n' for name in names))
        except OSError as error:
            raise _cannot_write(self._folder.parent, error) from error
        self._call([*self._command, "-x", "c++-header", str(shared), "-o", f"{shared}.gch"])
        return shared

    def _compile(self, shared: Path) -> list[str]:
        """Compiles an object file per unit, several at a time."""
        units = sources()
        objects = [str(self._folder / f"{'-'.join(unit.relative_to(SOURCE_DIR).parts)}.o") for unit in units]
        with ThreadPoolExecutor(min(_MAX_JOBS, len(os.sched_getaffinity(0)))) as pool:
            jobs = [
                pool.submit(self._call, [*self._command, "-include", str(shared), "-c", str(unit), "-o", result])
                for unit, result in zip(units, objects, strict=True)
            ]
            try:
                _wait_for(jobs)
            except BuildError:
                pool.shutdown(cancel_futures=True)
                raise
        return objects

    def _call(self, command: Sequence[str]) -> None:
        """Runs the compiler. The last argument is its output."""
        folder = self._folder
        try:
            # The compiler's temporary files are next to its output, so that only one disk can be full.
            environment = {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}
            timeout = max(0.0, self._deadline - time.monotonic())
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=timeout, env=environment)
        except subprocess.CalledProcessError as error:
            logger.debug("%s failed:\n%s", shlex.join(command), error.stderr)
            raise _failure(command[0], error.returncode, error.stderr, folder.parent) from error
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{command[0]} did not end within {_TIMEOUT_S} s", "free cores for it") from error
        except OSError as error:
            raise BuildError(f"{command[0]} does not start: {error}") from error


def _remove_abandoned(folder: Path) -> None:
    """Removes what builds left that were killed."""
    for path in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > 2 * _TIMEOUT_S:
                shutil.rmtree(path, ignore_errors=True)


def _wait_for(jobs: Iterable[Future[None]]) -> None:
    """Waits for all jobs, and logs how many are done. Raises what the first one raises that fails."""
    pending = set(jobs)
    total, started = len(pending), time.monotonic()
    due = started + _REPORT_EVERY_S
    while pending:
        done, pending = wait(pending, timeout=due - time.monotonic(), return_when=FIRST_COMPLETED)
        for job in done:
            job.result()
        now = time.monotonic()
        if pending and now >= due:
            due = now + max(_REPORT_EVERY_S, (now - started) / 10)
            done_units = total - len(pending)
            logger.info("compiling the CPU kernels: %d of %d units after %.0f s", done_units, total, now - started)


def _failure(compiler: str, code: int, output: str, folder: Path) -> BuildError:
    """Returns the error of a compiler that ended with this code and output, in one line. folder: what it writes to."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any(os.strerror(number) in output for number in (errno.ENOSPC, errno.EDQUOT)):
        return _disk_full(folder)
    if code < 0 or any("Killed signal" in line or "out of memory" in line for line in lines):
        return BuildError(f"{compiler} was killed, probably for want of memory", "free 1 GB for it, then start again")
    wrong = next((line for line in lines if "error:" in line), lines[0] if lines else f"exit code {code}")
    return BuildError(f"{compiler} failed: {wrong[:300]}")


def _cannot_write(folder: Path, error: OSError) -> BuildError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _disk_full(folder)
    return BuildError(f"cannot write to {folder}: {error}", "set PAGEWIRE_CACHE_DIR to a writable folder")


def _disk_full(folder: Path) -> BuildError:
    return BuildError(
        f"no space is left on the disk of {folder}, which keeps the compiled kernels",
        "free 200 MB there, or set PAGEWIRE_CACHE_DIR to a folder on another disk",
    )
