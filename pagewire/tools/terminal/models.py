"""`pagewire model pull`, `list`, `rm`: the models in the caches of this machine."""

import asyncio
import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pagewire import flags
from pagewire.config import ModelConfigFlags
from pagewire.config.fields import flag
from pagewire.errors import StartupError
from pagewire.files.model_files import gguf_splits
from pagewire.files.models import cache_directory, default_served_name, find_model
from pagewire.files.wheel_models import WHEEL_MODELS
from pagewire.stack.running import running_stacks
from pagewire.tools.terminal import page_cache
from pagewire.tools.terminal.stacks import NoFlags, models_of
from pagewire.tools.terminal.table import print_table, size_text


@dataclass(frozen=True)
class CachedModel:
    """A model on this machine. name: the MODEL for `pagewire serve`; of one in several GGUF files, the first of them.
    size: bytes. revisions: those of a repository of the Hub."""

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
    description = "The models in the caches of Pagewire and of the Hub, the newest first."
    flags.parse(NoFlags, argv, prog="pagewire list", description=description, flags_only=True)
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
    named = (model for model in cached_models() if config.model in (model.name, *map(str, model.paths)))
    model = next(named, None)
    if model is None:
        raise StartupError(f"no model {config.model!r} is in the caches; `pagewire list` shows the models")
    _check_unused(model)
    try:
        _delete(model)
    except OSError as error:
        raise StartupError(f"{model.name} cannot be deleted: {error}") from error
    print(f"deleted {model.name}, {size_text(model.size)}")
    return 0


def _check_unused(model: CachedModel) -> None:
    """Raises StartupError if a running stack serves the model."""
    names = {model.name, default_served_name(model.name)}
    for stack, lines, _ in asyncio.run(models_of(running_stacks())):
        if any(Path(stack.model) == path or path in Path(stack.model).parents for path in model.paths):
            raise StartupError(f"{model.name} is being served by process {stack.pid} (`pagewire ps`); stop that first")
        used = (line for line in lines if line.tokenizer_address and names & {line.name, *line.served_names})
        if line := next(used, None):
            remedy = f"`pagewire stop {line.name}`"
            raise StartupError(f"{model.name} is being served by process {stack.pid} (`pagewire ps`); first {remedy}")


def cached_models() -> list[CachedModel]:
    return [*_own_cache(), *_hub_cache()]


def _own_cache() -> Iterator[CachedModel]:
    directory = cache_directory() / "models"
    names = {model.file_name: name for name, model in WHEEL_MODELS.items()}
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.name in names:
            yield CachedModel(names[path.name], "PyPI", _bytes(path), path.stat().st_mtime, (path,))
        elif path.suffix == ".gguf" and (parts := _parts(path)):
            modified = max(part.stat().st_mtime for part in parts)
            yield CachedModel(str(path), "file", sum(map(_bytes, parts)), modified, tuple(parts))


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
            found = {file.file_path: file for file in files if file.file_name.endswith(".gguf")}
            for path in sorted(found):
                if parts := [found[part] for part in _parts(path) if part in found]:
                    size = sum(part.size_on_disk for part in parts)
                    paths = tuple(path for part in parts for path in (part.file_path, part.blob_path))
                    yield CachedModel(str(path), "Hub", size, modified, paths)


def _parts(path: Path) -> list[Path]:
    """Returns the files of a GGUF model that are there, if `path` is the first of them; none for its other files."""
    parts = [part for part in gguf_splits(path) if part.exists()]
    return parts if parts and parts[0] == path else []


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
