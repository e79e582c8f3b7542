"""The build of the C++ kernels: compiled once, cached, rebuilt when broken, replaced by torch where impossible."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagewire.kernels import backends
from pagewire.kernels.cpu.runtime import build
from tests.kernels.forked import Forks

USE_KERNELS = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import torch
from pagewire.kernels import ops
torch.set_num_threads(2)
x = torch.randn(64, 640)
torch.testing.assert_close(
    torch.ops.pagewire.silu_and_mul(x), torch.nn.functional.silu(x[:, :320]) * x[:, 320:], atol=1e-5, rtol=1e-5
)
torch.ops.pagewire.add_rms_norm(x, x.clone(), torch.ones(640), 1e-5)
print("backend", ops.cpu_backend())
print("triton imported", "triton" in sys.modules)
with open("/proc/self/maps") as maps:
    print("openmp", len({line.split()[-1] for line in maps if "libgomp" in line}))
"""


@pytest.fixture(scope="module")
def use_kernels() -> Iterator[Callable[..., str]]:
    """Returns what USE_KERNELS prints with a cache in this folder and these variables, in a process of its own."""
    forks = Forks()
    yield lambda cache, **environment: forks.output_of(USE_KERNELS, {"PAGEWIRE_CACHE_DIR": str(cache), **environment})
    forks.close()


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the names of processors are those of x86-64")
@pytest.mark.parametrize(
    "flags",
    ["x86-64 -DPAGEWIRE_PORTABLE", "x86-64-v3", "alderlake", "x86-64-v4", "sapphirerapids"],
)
def test_every_processor_has_kernels_that_compile(tmp_path: Path, flags: str) -> None:
    """Portable stands for what is no x86, and knows none of its instructions.

    The headers that most sources share are compiled once, as they take half of the time.
    """
    shared = tmp_path / "shared.h"
    headers = sorted((build._SOURCE_DIR / "common").glob("*.h"))
    shared.write_text("".join(f'#include "common/{header.name}"\n' for header in headers))
    options = [
        *build._compiler(),
        *build._FLAGS,
        build._INCLUDE,
        *shlex.split(f"-march={flags}"),
        "-O0",
    ]

    def check(*arguments: str) -> str:
        finished = subprocess.run([*options, *arguments], capture_output=True, text=True, check=False)
        return finished.stderr if finished.returncode else ""

    assert check("-x", "c++-header", "-o", f"{shared}.gch", str(shared)) == ""
    source_options = ("-include", str(shared), "-c", "-o", os.devnull)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        assert "".join(pool.map(lambda source: check(*source_options, str(source)), build._sources())) == ""


@pytest.fixture
def compiler(tmp_path: Path) -> str:
    """A compiler that takes no time: it hands out the library that this machine's real one has made."""
    library = Path(build.load_library()._name)
    script = tmp_path / "quick-g++"
    lines = (
        "#!/bin/sh",
        '[ "$1" = --version ] && exec echo quick',
        "for last; do :; done",
        f'exec cp {shlex.quote(str(library))} "$last"',
    )
    script.write_text("\n".join(lines))
    script.chmod(0o755)
    return str(script)


def test_compiled_once_and_shared_by_concurrent_processes(
    tmp_path: Path, compiler: str, use_kernels: Callable[..., str]
) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(lambda _: use_kernels(cache, CXX=compiler), range(2)))
    assert all("backend cpp" in output for output in outputs)
    assert any("compiled the CPU kernels" in output for output in outputs)
    assert [path.suffix for path in cache.iterdir()] == [".so"]  # nothing temporary is left
    again = use_kernels(cache, CXX=compiler)
    assert "compiling" not in again
    assert "triton imported False" in again
    assert "openmp 1" in again  # torch's runtime and no second one: two would fight for the cores


@pytest.mark.parametrize("kept", [0, 0.3, 0.999])
def test_a_truncated_library_is_compiled_again(
    tmp_path: Path, compiler: str, kept: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library is not loaded first, because missing parts of it would end the process."""
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", compiler)
    build.load_library()
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    damaged = path.with_suffix(".damaged")  # not in place: it is mapped here
    damaged.write_bytes(whole[: int(kept * len(whole))])
    damaged.replace(path)
    build.load_library()
    assert path.read_bytes() == whole
    assert f"compiled kernels {path} are damaged" in caplog.text


def test_a_changed_byte_is_noticed(tmp_path: Path, compiler: str, use_kernels: Callable[..., str]) -> None:
    cache = tmp_path / "cache"
    use_kernels(cache, CXX=compiler)
    (path,) = cache.iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    output = use_kernels(cache, CXX=compiler)
    assert output.count("are damaged") == 1
    assert "backend cpp" in output


def test_a_full_disk_is_named_first(tmp_path: Path, use_kernels: Callable[..., str]) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'as: x.o: No space left on device' >&2\nexit 1\n")
    compiler.chmod(0o755)
    output = use_kernels(tmp_path / "cache", CXX=str(compiler))
    assert f"no space is left on the disk of {tmp_path}/cache" in output
    assert "PAGEWIRE_CACHE_DIR" in output
    assert "backend torch" in output  # slower, but it serves


def test_without_a_compiler_torch_takes_over_and_says_so(tmp_path: Path, use_kernels: Callable[..., str]) -> None:
    output = use_kernels(tmp_path, CXX="no-such-compiler")
    assert "backend torch" in output
    assert output.count("no-such-compiler not found") == 1
    assert "install g++" in output


def test_failing_compiler_is_quoted(tmp_path: Path, use_kernels: Callable[..., str]) -> None:
    compiler = tmp_path / "broken-g++"
    compiler.write_text("#!/bin/sh\necho 'error: out of cheese' >&2\nexit 1\n")
    compiler.chmod(0o755)
    output = use_kernels(tmp_path / "cache", CXX=str(compiler))
    assert "out of cheese" in output
    assert "backend torch" in output
    assert not list((tmp_path / "cache").iterdir())


def test_a_failing_link_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "broken-g++"
    script = (
        "#!/bin/sh",
        "for last; do :; done",
        'case "$last" in *.o) exec touch "$last";; esac',
        "echo lost >&2; exit 1",
    )
    compiler.write_text("\n".join(script))
    compiler.chmod(0o755)
    with pytest.raises(build.BuildError, match=r"failed:\nlost"):
        build._compile([str(compiler)], tmp_path / "cache" / "kernels.so")
    assert not list((tmp_path / "cache").iterdir())


def test_torch_can_be_asked_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "torch")
    assert backends.choose() == "torch"
    assert "slower" in caplog.text


def test_the_triton_kernels_can_be_asked_for(tmp_path: Path, use_kernels: Callable[..., str]) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    output = use_kernels(tmp_path, PAGEWIRE_CPU_KERNELS="triton", TRITON_INTERPRET="1")
    assert "backend triton" in output
    assert "triton imported True" in output
    assert not list(tmp_path.iterdir())  # nothing was compiled


def test_the_triton_kernels_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1"):
        backends.choose()


def test_unknown_choice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "cuda")
    with pytest.raises(ValueError, match="PAGEWIRE_CPU_KERNELS='cuda' is unknown"):
        backends.choose()


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PAGEWIRE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_dir() == tmp_path / "pagewire"
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", str(tmp_path / "own"))
    assert build.cache_dir() == tmp_path / "own"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", "~/own")
    assert build.cache_dir() == tmp_path / "own"
