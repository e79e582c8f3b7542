"""The build of the C++ kernels: compiled once, cached, rebuilt when broken, replaced by torch where impossible."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagewire.kernels import backends
from pagewire.kernels.cpu.runtime import build, compiler, variants
from tests.kernels.forked import Forks

USE_KERNELS = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import torch
from pagewire.kernels import ops
torch.set_num_threads(2)
x = torch.randn(64, 640)
torch.testing.assert_close(
    torch.ops.pagewire.silu_and_mul(x, None), torch.nn.functional.silu(x[:, :320]) * x[:, 320:], atol=1e-5, rtol=1e-5
)
torch.ops.pagewire.add_rms_norm(x, x.clone(), torch.ones(640), 1e-5, None)
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


PORTABLE = variants.Variant("portable", ("-march=x86-64", "-DPAGEWIRE_PORTABLE"), frozenset())
COMPILED = [(machine, one) for machine in ("x86_64", "aarch64") for one in variants.of_machine(machine)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "variant"), [("x86_64", PORTABLE), *COMPILED], ids=lambda value: getattr(value, "name", value)
)
def test_every_processor_has_kernels_that_compile(tmp_path: Path, machine: str, variant: variants.Variant) -> None:
    """Portable stands for what is neither of the two, and knows none of their instructions."""
    command = [f"{machine}-linux-gnu-g++"]
    if shutil.which(command[0]) is None:
        command = list(compiler.Compiler.find().command)
        if machine != platform.machine():
            pytest.skip(f"no compiler for {machine}")
    options = (*command, *compiler.FLAGS, compiler.INCLUDE, *variant.flags, "-O0", "-c", "-o", os.devnull)

    def check(source: Path) -> str:
        finished = subprocess.run([*options, str(source)], capture_output=True, text=True, check=False)
        return finished.stderr if finished.returncode else ""

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        assert "".join(pool.map(check, compiler.sources())) == ""


@pytest.fixture
def quick(tmp_path: Path) -> str:
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
    tmp_path: Path, quick: str, use_kernels: Callable[..., str]
) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(lambda _: use_kernels(cache, CXX=quick), range(2)))
    assert all("backend cpp" in output for output in outputs)
    assert any("compiled the CPU kernels" in output for output in outputs)
    assert [path.suffix for path in cache.iterdir()] == [".so"]  # nothing temporary is left
    again = use_kernels(cache, CXX=quick)
    assert "compiling" not in again
    assert "triton imported False" in again
    assert "openmp 1" in again  # torch's runtime and no second one: two would fight for the cores


@pytest.mark.parametrize("kept", [0, 0.3, 0.999])
def test_a_truncated_library_is_compiled_again(
    tmp_path: Path, quick: str, kept: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library is not loaded first, because missing parts of it would end the process."""
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", quick)
    build.load_library()
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    damaged = path.with_suffix(".damaged")  # not in place: it is mapped here
    damaged.write_bytes(whole[: int(kept * len(whole))])
    damaged.replace(path)
    build.load_library()
    assert path.read_bytes() == whole
    assert f"compiled kernels {path} are damaged" in caplog.text


def test_a_changed_byte_is_noticed(tmp_path: Path, quick: str, use_kernels: Callable[..., str]) -> None:
    cache = tmp_path / "cache"
    use_kernels(cache, CXX=quick)
    (path,) = cache.iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    output = use_kernels(cache, CXX=quick)
    assert output.count("are damaged") == 1
    assert "backend cpp" in output


def script(path: Path, *lines: str) -> str:
    path.write_text("\n".join(("#!/bin/sh", *lines)))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("version", "work", "reason"),
    [
        ("12.2.0", "echo 'as: x.o: No space left on device' >&2; exit 1", "no space is left on the disk of"),
        ("12.2.0", "echo 'in a.h:' >&2; echo 'a.h:1: error: out of cheese' >&2; exit 1", "a.h:1: error: out of cheese"),
        ("13.1.0", "echo 'fatal error: cmath: No such file or directory' >&2; exit 1", "cmath: No such file"),
        ("14.1.0", "echo 'fatal error: Killed signal terminated program cc1plus' >&2; exit 1", "for want of memory"),
        ("12.2.0", "kill -9 $$", "for want of memory"),
        ("12.2.0", "exit 3", "exit code 3"),
        ("9.4.0", "exit 0", "version 9, too old for the kernels"),
    ],
)  # fmt: skip
def test_a_compiler_that_fails_is_replaced_by_torch(
    tmp_path: Path, use_kernels: Callable[..., str], version: str, work: str, reason: str
) -> None:
    cache = tmp_path / "cache"
    told = f'[ "$1" = --version ] && {{ echo "g++ (Debian) {version}"; echo Free Software Foundation; exit; }}'
    output = use_kernels(cache, CXX=script(tmp_path / "g++", told, work))
    (line,) = [line for line in output.splitlines() if "times slower" in line]  # once, and in one line
    assert reason in line
    assert "backend torch" in output  # slower, but it serves
    assert not list(cache.glob("*"))


@pytest.mark.parametrize("command", ["no-such-compiler", "/dev/null", "'", "/"])
def test_without_a_compiler_torch_takes_over_and_says_so(
    tmp_path: Path, use_kernels: Callable[..., str], command: str
) -> None:
    output = use_kernels(tmp_path, CXX=command)
    assert "backend torch" in output
    assert output.count("times slower") == 1
    assert command in output and "apt install g++" in output


def test_a_program_that_is_no_compiler_is_replaced_by_torch(tmp_path: Path, use_kernels: Callable[..., str]) -> None:
    empty = tmp_path / "g++"
    empty.write_bytes(b"\x7fELF")
    empty.chmod(0o755)
    output = use_kernels(tmp_path / "cache", CXX=str(empty))
    assert f"the C++ compiler {empty} does not start" in output
    assert "backend torch" in output


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, use_kernels: Callable[..., str]) -> None:
    (tmp_path / "cache").touch()
    output = use_kernels(tmp_path / "cache", CXX=script(tmp_path / "g++", "exit 0"))
    assert f"cannot write to {tmp_path / 'cache'}" in output
    assert "set PAGEWIRE_CACHE_DIR" in output
    assert "backend torch" in output


def test_a_failing_link_is_quoted(tmp_path: Path) -> None:
    linker = script(
        tmp_path / "g++",
        "for last; do :; done",
        'case "$last" in *.o|*.gch) exec touch "$last";; esac',
        "echo lost >&2; exit 1",
    )
    with pytest.raises(backends.BuildError, match=r"failed: lost"):
        compiler.Compiler((linker,), "").compile((), tmp_path / "cache" / "kernels.so")
    assert not list((tmp_path / "cache").iterdir())


def test_the_progress_is_logged(tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compiler, "_REPORT_EVERY_S", 0.0)
    caplog.set_level("INFO")
    quick = script(tmp_path / "g++", "for last; do :; done", 'exec touch "$last"')
    compiler.Compiler((quick,), "").compile((), tmp_path / "kernels.so")
    total = len(compiler.sources())
    done = [int(count) for count in re.findall(rf"(\d+) of {total} units", caplog.text)]
    assert done == sorted(done) and done


def test_what_a_killed_build_left_is_removed(tmp_path: Path) -> None:
    old, present = tmp_path / ".kernels-old", tmp_path / ".kernels-new"
    for folder in (old, present):
        folder.mkdir()
        (folder / "shared.h").touch()
    os.utime(old, (0, 0))
    quick = script(tmp_path / "g++", "for last; do :; done", 'exec touch "$last"')
    compiler.Compiler((quick,), "").compile((), tmp_path / "kernels.so")
    assert {path.name for path in tmp_path.iterdir()} == {".kernels-new", "g++", "kernels.so"}


def test_the_slowest_unit_comes_first() -> None:
    first, *others = compiler.sources()
    assert first.is_file() and first not in others


CPUINFO = {
    "Sapphire Rapids": ("flags", f"fpu {' '.join(sorted(variants.of_machine('x86_64')[0].needs))}", "amx"),
    "Zen 4": ("flags", "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave avx512f avx512bw avx512cd avx512dq avx512vl "
              "avx512_vnni avx512_bf16", "avx512-bf16"),
    "Ice Lake": ("flags", "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave avx512f avx512bw avx512cd avx512dq avx512vl "
                 "avx512_vnni", "avx512-vnni"),
    "Skylake": ("flags", "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave avx512f avx512bw avx512cd avx512dq avx512vl",
                "avx512"),
    "Alder Lake": ("flags", "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave avx_vnni", "avx-vnni"),
    "Zen 2": ("flags", "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave", "avx2"),
    "Sandy Bridge": ("flags", "avx xsave", None),
    "Graviton": ("Features", "fp asimd evtstrm", "neon"),
}  # fmt: skip


@pytest.mark.parametrize("name", CPUINFO)
def test_a_processor_gets_the_fastest_library_that_it_runs(name: str) -> None:
    label, words, expected = CPUINFO[name]
    flags = variants.processor_flags(f"processor\t: 0\n{label}\t\t: {words}\n\nprocessor\t: 1\n{label}\t: none\n")
    machine = "x86_64" if label == "flags" else "aarch64"
    assert next((variant.name for variant in variants.suitable(flags, machine)), None) == expected


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel's library that suits this processor, and no compiler."""
    own = Path(build.load_library()._name)
    monkeypatch.setattr(build, "SHIPPED_DIR", tmp_path / "shipped")
    monkeypatch.setattr(variants, "of_machine", lambda machine=None: (PORTABLE,))
    monkeypatch.setenv("CXX", "no-such-compiler")
    (tmp_path / "shipped").mkdir()
    path = tmp_path / "shipped" / build.shipped_name(PORTABLE)
    shutil.copy(own, path)
    return path


def test_a_wheel_with_kernels_needs_no_compiler(shipped: Path) -> None:
    assert build.outlook() == build.Outlook(shipped)
    assert build.load_library()._name == str(shipped)


def test_a_wheels_library_that_is_damaged_is_not_loaded(shipped: Path, caplog: pytest.LogCaptureFixture) -> None:
    shipped.write_bytes(shipped.read_bytes()[:-1])
    with pytest.raises(backends.BuildError, match="no-such-compiler not found"):
        build.load_library()
    assert f"{shipped} is damaged; reinstall pagewire" in caplog.text


def test_a_wheels_library_of_other_sources_is_not_loaded(shipped: Path) -> None:
    shipped.rename(shipped.with_name("kernels-portable-0123456789abcdef.so"))
    with pytest.raises(backends.BuildError, match="no-such-compiler not found"):
        build.load_library()


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
