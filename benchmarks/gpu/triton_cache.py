"""Compiled kernels that travel: `python -m benchmarks.gpu.triton_cache pack`, after a rehearsal has compiled them.

Triton finds a kernel by a hash of its own Python files and library, of ptxas's version and of the kernel's source with
its line numbers (3.6.0: `runtime.cache.get_cache_key`, `compiler.ASTSource.hash`); no path is in it, and no driver. So
what is compiled for sm_90 under the same wheel of Triton, also without a GPU, is found, for the commit it was compiled
of. A wheel's library is of one Python version. Where kernels lie is in the cache by absolute paths, so it has to be the
same directory, `DIRECTORY`. The packed file names what it was made of, and is left out where that is another.

    python3.12 -m venv VENV; VENV/bin/pip install torch==2.11.0 triton==3.6.0 ...
    TRITON_CACHE_DIR=/tmp/pagewire-triton VENV/bin/python -m benchmarks.gpu.rehearsal --only decode,prefill,w4
    VENV/bin/python -m benchmarks.gpu.triton_cache pack
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

DIRECTORY = Path("/tmp/pagewire-triton")
PACKED, KEY = "cache.tar.xz", "key.txt"
# Of a compiled kernel what a launch needs: its description and machine code, not how it came about.
_NEEDED = (".json", ".cubin")
_SECONDS = 60.0


def key() -> str:
    """Returns what all kernels' keys have in common: Triton's files and its assembler's version."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    return f"{triton_key()}-{make_backend(GPUTarget('cuda', 90, 32)).hash()}"


def pack(directory: Path, luggage: Path, made_of: str) -> int:
    """Packs a cache; returns its size in bytes."""
    luggage.mkdir(parents=True, exist_ok=True)
    with tarfile.open(luggage / PACKED, "w:xz") as archive:
        for path in sorted(directory.rglob("*")):
            if path.is_file() and path.suffix in _NEEDED:
                archive.add(path, path.relative_to(directory))
    (luggage / KEY).write_text(made_of)
    return (luggage / PACKED).stat().st_size


def unpacked(luggage: Path, python: str, directory: Path = DIRECTORY) -> tuple[str, dict[str, str]]:
    """Unpacks a cache that fits this machine. Returns a line about it, and variables for processes."""
    if not (luggage / PACKED).exists():
        return "compiled kernels: none travelled", {}
    try:
        result = subprocess.run(
            [python, "-m", "benchmarks.gpu.triton_cache", "key"], capture_output=True, text=True, check=True,
            timeout=_SECONDS, cwd=Path(__file__).parents[2],
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return f"compiled kernels: left out, as Triton's key cannot be had: {error}", {}
    if result.stdout.strip() != (luggage / KEY).read_text().strip():
        return "compiled kernels: left out, as they were compiled by another build of Triton", {}
    directory.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO((luggage / PACKED).read_bytes())) as archive:
        names = archive.getnames()
        archive.extractall(directory, filter="data")
    count = sum(name.endswith(".cubin") for name in names)
    return f"compiled kernels: {count} travelled", {"TRITON_CACHE_DIR": str(directory)}


def main() -> int:
    if sys.argv[1:] == ["key"]:
        print(key())
        return 0
    if sys.argv[1:] != ["pack"]:
        print(__doc__)
        return 2
    from benchmarks.gpu.luggage import LUGGAGE

    print(f"{pack(DIRECTORY, LUGGAGE / 'triton', key()) / (1 << 20):.1f} MiB: {LUGGAGE / 'triton' / PACKED}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
