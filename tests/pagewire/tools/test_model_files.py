"""`pagewire model pull`, `verify` and `rm`: a repository from a mirror of the Hub, and its damage."""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire import cli
from pagewire.errors import StartupError
from pagewire.tools.terminal import page_cache, verify
from tests.pagewire.tools.hub_server import hub

REPOSITORY = "me/tiny"


def shard(names: list[str]) -> bytes:
    """A safetensors file with a kilobyte for each tensor."""
    header = json.dumps(
        {
            name: {"dtype": "U8", "shape": [1024], "data_offsets": [at * 1024, (at + 1) * 1024]}
            for at, name in enumerate(names)
        }
    ).encode()
    return struct.pack("<Q", len(header)) + header + bytes(1024 * len(names))


SHARDS = {f"model-0000{number}-of-00002.safetensors": [f"a{number}", f"b{number}"] for number in (1, 2)}
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {name: file for file, names in SHARDS.items() for name in names}}
    ).encode(),
    **{file: shard(names) for file, names in SHARDS.items()},
    "README.md": b"not needed to serve",
}
SECOND = "model-00002-of-00002.safetensors"


def pagewire(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagewire.cli", *arguments]
    return subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def pulled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Hub's cache after a pull from a mirror."""
    home = tmp_path_factory.mktemp("hub")
    with hub(REPOSITORY, FILES) as url:
        finished = pagewire("model", "pull", REPOSITORY, "--warm", HF_ENDPOINT=url, HF_HOME=str(home))
        assert finished.returncode == 0, finished.stderr
        assert f"serve it with: pagewire serve {REPOSITORY}" in finished.stdout
        assert "in memory" in finished.stdout
        yield home / "hub"


@pytest.fixture
def cache(pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to damage."""
    shutil.copytree(pulled, tmp_path / "hub", symlinks=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def file(cache: Path, name: str) -> Path:
    (found,) = cache.glob(f"models--me--tiny/snapshots/*/{name}")
    return found


def test_what_was_pulled_is_intact_by_its_hashes(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._dispatch(["model", "verify", REPOSITORY]) == 0
    said = capsys.readouterr().out
    assert f"{REPOSITORY}: 4 files, 0 MB, intact" in said, "without the README, which serving does not need"
    assert said.count("sha256") == 2 and said.count("git sha1") == 2


def test_a_byte_that_has_changed_is_found(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with file(cache, SECOND).open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"x")
    assert cli._dispatch(["model", "verify", "--quick", REPOSITORY]) == 0, "lengths and headers are what they were"
    assert cli._dispatch(["model", "verify", REPOSITORY]) == 1
    said = capsys.readouterr().out
    assert f"{SECOND}: its sha256 is" in said
    assert f"pagewire model rm {REPOSITORY} && pagewire model pull {REPOSITORY}" in said


def test_what_is_cut_off_or_gone_is_found_without_reading_it_all(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(cache, SECOND)
    os.truncate(path, path.stat().st_size - 100)
    assert cli._dispatch(["model", "verify", "--quick", REPOSITORY]) == 1
    assert "by its header" in capsys.readouterr().out
    path.resolve().unlink()
    assert cli._dispatch(["model", "verify", "--quick", REPOSITORY]) == 1
    assert f"{SECOND}: it cannot be read" in capsys.readouterr().out
    path.unlink()
    assert cli._dispatch(["model", "verify", "--quick", REPOSITORY]) == 1
    assert "model.safetensors.index.json names it, but it is missing" in capsys.readouterr().out


def test_an_interrupted_download_is_found(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cache / "models--me--tiny" / "blobs" / "abc.incomplete").write_bytes(b"half")
    assert cli._dispatch(["model", "verify", REPOSITORY]) == 1
    assert "a download was interrupted" in capsys.readouterr().out


def test_a_shard_without_a_tensor_of_the_index_is_found(cache: Path) -> None:
    path = file(cache, SECOND)
    path.unlink()
    path.write_bytes(shard(["a2"]))
    problems = [one.problem for one in verify.checked(path.parent)]
    assert "model.safetensors.index.json names b2 in it, which is missing" in problems


def test_what_is_not_there_is_said(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._dispatch(["model", "rm", REPOSITORY]) == 0
    for model in (REPOSITORY, "smollm2-135m-instruct"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(StartupError, match=f"pagewire model pull {model}"):
            patch.setenv("PAGEWIRE_CACHE_DIR", str(cache))
            cli._dispatch(["model", "verify", model])


def test_a_gguf_file_is_read_as_far_as_its_header(
    smollm2_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._dispatch(["model", "verify", str(smollm2_gguf)]) == 0
    assert ": 1 file, " in capsys.readouterr().out
    cut = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as whole:
        cut.write_bytes(whole.read(4 << 20))
    assert cli._dispatch(["model", "verify", str(cut)]) == 1
    assert "it ends before tensor" in capsys.readouterr().out


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_a_finding(tmp_path: Path, index: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert verify.main([str(tmp_path)]) == 1
    assert "damaged" in capsys.readouterr().out


def test_a_folder_without_a_model_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "large.bin").write_bytes(b"a")
    with pytest.raises(StartupError, match="holds no model"):
        verify.main([str(tmp_path)])


def test_warming_brings_a_file_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(8 << 20))
    with path.open("rb") as written:
        os.fsync(written.fileno())
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = page_cache.resident(path)
    if before:
        pytest.skip("this file system keeps its files in memory")
    assert page_cache.warm([path]) == 8 << 20
    assert page_cache.resident(path) == 8 << 20
    assert page_cache.warm([path]) == 0


def test_usage_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._dispatch(["model"]) == 2
    assert "pull" in capsys.readouterr().err
    assert cli._dispatch(["model", "--help"]) == 0
    assert cli._dispatch(["model", "vrify"]) == 2
    assert "verify" in capsys.readouterr().err
