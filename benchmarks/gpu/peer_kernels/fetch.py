"""Brings what travels to a GPU machine to `peers/`: `python -m benchmarks.gpu.peer_kernels.fetch`.

- `fa3`: FlashAttention 3 as vLLM builds it, and `marlin`: the library with vLLM's Marlin and Machete. They are two
  members of vLLM's wheel, read by HTTP range (the wheel has 261 MiB), packed with xz. The wheel was built for torch
  2.11 with CUDA 13.
- `gemlite`: GemLite, which is Python and Triton.
- `stubs`: protobuf in the version that our stubs were made with, for a machine with an older one.

All come from the package index that pip is configured for. `peers/` is in .gitignore; carry what a command needs to the
GPU machine.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.luggage import STUBS
from benchmarks.gpu.peer_kernels.files import FA3, FA3_FILE, GEMLITE, PEERS, VLLM, VLLM_FILE

VLLM_WHEEL = "vllm==0.23.0"
VLLM_MEMBERS = {FA3: f"vllm/vllm_flash_attn/{FA3_FILE}", VLLM: f"vllm/{VLLM_FILE}"}
PROTOBUF = "protobuf==7.35.1"
GEMLITE_SOURCE = "gemlite==0.6.0.post2"  # there is no wheel
MAX_BYTES = 64 << 20
READ_AHEAD = 4 << 20


class RemoteFile(io.RawIOBase):
    """A file on a server that honours Range, seekable, so that zipfile reads only what it needs."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._position = 0
        with urllib.request.urlopen(_range(url, 0, 0)) as answer:
            if answer.status != 206:
                raise OSError("the package index does not honour HTTP Range: download the whole wheel with pip")
            self._size = int(answer.headers["Content-Range"].rsplit("/")[-1])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        with urllib.request.urlopen(_range(self._url, self._position, end - 1)) as answer:
            data = answer.read()
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _range(url: str, first: int, last: int) -> urllib.request.Request:
    return urllib.request.Request(url, headers={"Range": f"bytes={first}-{last}"})


def wheel_url(requirement: str, python: str) -> str:
    """Returns the address from which pip would download it; pip reads the index, not the wheel."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        _pip("install", "--dry-run", "--ignore-installed", "--quiet", "--target", directory, "--report", str(report),
             *_target(python), requirement)  # fmt: skip
        (item,) = json.loads(report.read_text())["install"]
    return str(item["download_info"]["url"])


def _target(python: str) -> list[str]:
    """Wheels for the GPU machine, whatever this one is."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31, 34, 35)]
    return ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation=cp", *platforms,
            "--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]  # fmt: skip


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, stdout=subprocess.DEVNULL)


def fetch_vllm(python: str) -> None:
    remote = io.BufferedReader(RemoteFile(wheel_url(VLLM_WHEEL, python)), READ_AHEAD)
    with zipfile.ZipFile(remote) as wheel:
        for folder, member in VLLM_MEMBERS.items():
            (PEERS / folder).mkdir()
            packed = PEERS / folder / f"{Path(member).name}.xz"
            with wheel.open(member) as source, lzma.open(packed, "wb", preset=6) as target:
                shutil.copyfileobj(source, target, READ_AHEAD)


def fetch_packages(python: str) -> None:
    _pip("download", "--quiet", "-d", str(PEERS / STUBS), *_target(python), PROTOBUF)
    _pip("download", "--quiet", "-d", str(PEERS / GEMLITE), "--no-deps", GEMLITE_SOURCE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="Python version of the GPU machine (default: 3.12)")
    python = parser.parse_args().python
    shutil.rmtree(PEERS, ignore_errors=True)
    PEERS.mkdir()
    fetch_packages(python)
    print("vLLM: reading 71 MiB and packing 187 MiB with xz, two minutes or so", flush=True)
    fetch_vllm(python)
    total = 0
    for path in sorted(path for path in PEERS.rglob("*") if path.is_file()):
        total += path.stat().st_size
        print(f"{path.stat().st_size / (1 << 20):8.1f} MiB  {path.relative_to(PEERS)}")
    print(f"{total / (1 << 20):8.1f} MiB in all, {'within' if total <= MAX_BYTES else 'OVER'} 64 MiB")
    return 0 if total <= MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
