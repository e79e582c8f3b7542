"""Finds the files of MODEL: a directory, a .gguf file, a hub id or a model from PyPI."""

import os
import re
from pathlib import Path

from pagewire.config import ModelConfigFlags
from pagewire.errors import ModelNotFoundError
from pagewire.files.wheel_models import WHEEL_MODELS, check_license, wheel_model

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.tiktoken", "*.jinja", "*.txt"]


def default_served_name(model: str) -> str:
    """Returns the name of the model for clients, without --served-model-name."""
    path = Path(model)
    if model in WHEEL_MODELS or not path.exists():
        return path.name if path.is_absolute() else model
    path = path.resolve()
    return path.name if path.is_dir() else path.stem


def find_model(config: ModelConfigFlags) -> Path:
    """Returns the files of the model that the flags name. Raises StartupError."""
    return resolve_model(config.model, config.revision, config.download_dir, config.accept_license)


def local_model(model: str, download_dir: str | None = None, revision: str | None = None) -> Path | None:
    """Returns the model's directory or .gguf file, without a download; None if it is not on this machine."""
    if model in WHEEL_MODELS:
        path = cache_directory() / "models" / WHEEL_MODELS[model].file_name
        return path if path.exists() else None
    path = Path(model).expanduser()
    if path.exists():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", cache_dir=download_dir, revision=revision)
    # ValueError is the only common base of its errors for a malformed id; the package may be missing.
    except (ImportError, ValueError):
        return None
    return Path(found).parent if isinstance(found, str) else None


def is_of_hub(model: str) -> bool:
    """Returns whether MODEL can only be a hub id: it is neither on disk nor from PyPI."""
    return model not in WHEEL_MODELS and not Path(model).expanduser().exists()


def may_be_of_hub(model: str) -> bool:
    """Returns whether MODEL can only be a hub id, and has the form of one."""
    return is_of_hub(model) and bool(_HUB_ID.fullmatch(model)) and Path(model).suffix != ".gguf"


def resolve_model(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    accepted_license: str | None = None,
    *,
    pickled: bool = False,
) -> Path:
    """Returns the model's directory or .gguf file; downloads it if needed. Raises ModelNotFoundError.

    revision, download_dir: for a hub id. accepted_license: for a model of `wheel_models`. pickled: includes
    `pytorch_model.bin` of a hub id. Several processes may call this at once for the same model: one downloads, the
    others wait for it.
    """
    check_name(model, revision, accepted_license)
    if model in WHEEL_MODELS:
        return wheel_model(model, cache_directory() / "models", accepted_license)
    path = Path(model).expanduser()
    return path.resolve() if path.exists() else _from_hub(model, revision, download_dir, pickled)


def check_name(model: str, revision: str | None = None, accepted_license: str | None = None) -> None:
    """Checks what can be known of MODEL without a download. Raises ModelNotFoundError."""
    path = Path(model).expanduser()
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
    elif not may_be_of_hub(model):
        raise ModelNotFoundError(
            f"no model {model!r}: there is no such file or directory; name an existing one, a hub id (owner/name),"
            f" or one of {', '.join(WHEEL_MODELS)}, which come from PyPI"
        )


def cache_directory() -> Path:
    """Returns $PAGEWIRE_CACHE_DIR, else pagewire in $XDG_CACHE_HOME, else in ~/.cache."""
    if own := os.environ.get("PAGEWIRE_CACHE_DIR"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "pagewire"


def _from_hub(model: str, revision: str | None, download_dir: str | None, pickled: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelNotFoundError(
            f"{model}: no such file or directory, and hub ids need huggingface_hub: pip install 'pagewire[executor]'"
        ) from error
    try:
        directory = None if download_dir is None else Path(download_dir).expanduser()
        files = [*_HUB_FILES, *["pytorch_model.bin"] * pickled]
        path = Path(snapshot_download(model, revision=revision, cache_dir=directory, allow_patterns=files))
    # Errors of the hub, HTTP errors and broken connections only have Exception as a common base.
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ModelNotFoundError(
            f"{model}: no such file or directory, and the hub did not provide it ({type(error).__name__}: {reason})."
            " Check the name and the connection, log in with `hf auth login` if it is private, or name a model on disk"
        ) from error
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(f"{model}: the repository has no config.json; download its .gguf file and name that")
    return path
