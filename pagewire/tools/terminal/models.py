"""`pagewire model pull`, `list`, `rm`: the models in the caches of this machine. `pagewire ps`: the stacks on it."""

import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagewire import flags
from pagewire.config import ModelConfigFlags
from pagewire.config.fields import flag
from pagewire.errors import StartupError
from pagewire.files.models import cache_directory, find_model
from pagewire.files.wheel_models import WHEEL_MODELS
from pagewire.progress_line import duration
from pagewire.stack.running import running_stacks
from pagewire.tools.terminal import page_cache
from pagewire.tools.terminal.table import print_table, size_text


@dataclass(frozen=True)
class CachedModel:
    """A model on this machine. name: the MODEL for `pagewire serve`. size: bytes. revisions: those of a repository of
    the Hub."""

    name: str
    source: str
    size: int
    modified: float  # Unix time, seconds
    paths: tuple[Path, ...]
    revisions: tuple[str, ...] = field(default=())


@dataclass(frozen=True, kw_only=True)
class PullConfig(ModelConfigFlags):
    """`pagewire model pull`."""

    warm: bool = flag(
        False,
        "read the model's files once, so that a service that starts soon finds them in memory",
        group="model",
    )


@dataclass(frozen=True, kw_only=True)
class RmConfig:
    model: str = flag("", "a model, as `pagewire list` names it", group="model")


@dataclass(frozen=True, kw_only=True)
class NoFlags:
    """The configuration of commands without flags."""


def pull(argv: list[str]) -> int:
    config = flags.parse(
        PullConfig,
        argv,
        prog="pagewire pull",
        description="Downloads MODEL, a Hub id or one that comes from PyPI, unless it is already there.",
        positional="model",
        flags_only=True,
    )
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    for noisy in ("httpx", "httpx2"):  # of the Hub's client, by its version
        logging.getLogger(noisy).setLevel(logging.WARNING)
    path = find_model(config)
    print(f"{config.model} is at {path}\nserve it with: pagewire serve {config.model}")
    if config.warm:
        _warm(path)
    return 0


def _warm(path: Path) -> None:
    """Reads files into memory. Files without room stay on disk, because reading them would only evict others."""
    size, room = _bytes(path), page_cache.available()
    if size > room:
        print(f"not read into memory: it has {size_text(size)}, and {size_text(room)} are free")
        return
    files = [file for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    read = page_cache.warm(files)
    print(f"{size_text(size)} are in memory, {size_text(read)} of it read now")


def list_models(argv: list[str]) -> int:
    _no_flags(argv, "list", "The models in the caches of Pagewire and of the Hub, the newest first.")
    models = sorted(cached_models(), key=lambda model: -model.modified)
    if not models:
        print("no models yet: pagewire pull MODEL")
        return 0
    rows = [
        (m.name, m.source, size_text(m.size), time.strftime("%Y-%m-%d", time.localtime(m.modified))) for m in models
    ]
    print_table(("NAME", "FROM", "SIZE", "MODIFIED"), rows)
    return 0


def rm(argv: list[str]) -> int:
    """Raises StartupError."""
    config = flags.parse(
        RmConfig,
        argv,
        prog="pagewire rm",
        description="Deletes MODEL from the cache, as `pagewire list` names it.",
        positional="model",
        flags_only=True,
    )
    if not config.model:
        raise StartupError("name the model to delete; `pagewire list` shows the models")
    model = next((model for model in cached_models() if model.name == config.model), None)
    if model is None:
        raise StartupError(f"no model {config.model!r} is in the caches; `pagewire list` shows the models")
    for stack in running_stacks():
        if any(Path(stack.model) == path or path in Path(stack.model).parents for path in model.paths):
            raise StartupError(f"{model.name} is being served by process {stack.pid} (`pagewire ps`); stop that first")
    try:
        _delete(model)
    except OSError as error:
        raise StartupError(f"{model.name} cannot be deleted: {error}") from error
    print(f"deleted {model.name}, {size_text(model.size)}")
    return 0


def ps(argv: list[str]) -> int:
    _no_flags(argv, "ps", "The stacks of this user that run on this machine, the newest last.")
    stacks = running_stacks()
    if not stacks:
        print("no stack is running: pagewire serve MODEL")
        return 0
    rows = [
        (
            ",".join(stack.names),
            str(stack.pid),
            f"{stack.rest}/v1" if stack.rest else "none",
            stack.grpc,
            duration(time.time() - stack.started),
            "serve" if stack.shared else "one program",
        )
        for stack in stacks
    ]
    print_table(("MODEL", "PID", "REST", "GRPC", "UP", "FOR"), rows)
    return 0


def cached_models() -> list[CachedModel]:
    return [*_own_cache(), *_hub_cache()]


def _own_cache() -> Iterator[CachedModel]:
    directory = cache_directory() / "models"
    names = {model.file_name: name for name, model in WHEEL_MODELS.items()}
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.name in names:
            yield CachedModel(names[path.name], "PyPI", _bytes(path), path.stat().st_mtime, (path,))
        elif path.suffix == ".gguf":
            yield CachedModel(str(path), "file", _bytes(path), path.stat().st_mtime, (path,))


def _hub_cache() -> Iterator[CachedModel]:
    """Yields repositories with config.json by their ids, and GGUF files of other repositories by their paths."""
    try:
        from huggingface_hub import CacheNotFound, constants, scan_cache_dir
    except ImportError:
        return
    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repository in repositories:
        files = [file for revision in repository.revisions for file in revision.files]
        hashes = tuple(revision.commit_hash for revision in repository.revisions)
        modified = float(repository.last_modified)
        if repository.repo_type == "model" and any(file.file_name == "config.json" for file in files):
            yield CachedModel(
                repository.repo_id, "Hub", repository.size_on_disk, modified, (repository.repo_path,), hashes
            )
        elif repository.repo_type == "model":
            for file in files:
                if file.file_name.endswith(".gguf"):
                    paths = (file.file_path, file.blob_path)
                    yield CachedModel(str(file.file_path), "Hub", file.size_on_disk, modified, paths)


def _delete(model: CachedModel) -> None:
    if model.revisions:
        from huggingface_hub import constants, scan_cache_dir

        scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(*model.revisions).execute()
        return
    for path in model.paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())


def _no_flags(argv: list[str], command: str, description: str) -> Any:
    return flags.parse(NoFlags, argv, prog=f"pagewire {command}", description=description, flags_only=True)
