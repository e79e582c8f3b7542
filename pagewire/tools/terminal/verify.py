"""`pagewire model verify MODEL`: checks whether the files of a model on this machine are intact.

Models from PyPI have a known SHA-256. In the Hub's cache files are named by the hashes of their contents: SHA-256 for
large ones, Git's SHA-1 for small ones. For other files, only the form is checked: readable headers, and the lengths and
numbers of files that they state.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire import flags
from pagewire.config.fields import flag
from pagewire.errors import StartupError
from pagewire.files.damaged_file import remedy
from pagewire.files.file_form import form_error, safetensors_names
from pagewire.files.hub import hub_name, snapshot
from pagewire.files.models import cache_directory, is_of_hub
from pagewire.files.wheel_models import WHEEL_MODELS, WheelModel
from pagewire.tools.terminal.table import print_table, size_text

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_CHUNK = 1 << 20
# A folder with a model has at least one of these.
_OF_MODELS = ("config.json", "*.safetensors*", "*.gguf")


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """`pagewire model verify`."""

    model: str = flag("", "a model on this machine, as `pagewire list` names it, or its path", group="model")
    revision: str | None = flag(None, "branch, tag or commit of a hub id (default: its main branch)", group="model")
    download_dir: str | None = flag(None, "directory for models from the hub (default: the hub's cache)", group="model")
    quick: bool = flag(False, "only sizes and headers: nothing is read as a whole", group="model")


@dataclass(frozen=True)
class Checked:
    """The result for a file. problem: the error, or "". how: the kind of check."""

    name: str
    size: int
    how: str
    problem: str = ""


def main(argv: list[str]) -> int:
    """Returns 0 if the files are intact, 1 if damaged. Raises StartupError for a missing model."""
    config = flags.parse(
        VerifyConfig,
        argv,
        prog="pagewire model verify",
        description="Checks the files of MODEL: hashes where they are known, else headers, lengths and shards.",
        positional="model",
        flags_only=True,
    )
    if not config.model:
        raise StartupError("name the model to verify; `pagewire list` shows the models")
    path = _locate(config)
    files = checked(path, WHEEL_MODELS.get(config.model), quick=config.quick)
    print_table(
        ("FILE", "SIZE", "CHECKED", ""),
        [(one.name, size_text(one.size), one.how, "damaged" if one.problem else "ok") for one in files],
    )
    total = size_text(sum(one.size for one in files))
    damaged = [one for one in files if one.problem]
    if not damaged:
        print(f"{config.model}: {len(files)} {'files' if len(files) > 1 else 'file'}, {total}, intact")
        return 0
    for one in damaged:
        print(f"{one.name}: {one.problem}")
    cached = config.model in WHEEL_MODELS or is_of_hub(config.model)
    again = f"pagewire model rm {config.model} && pagewire model pull {config.model}"
    print(f"{config.model} is damaged: {again if cached else remedy(path / damaged[0].name)}")
    return 1


def _locate(config: VerifyConfig) -> Path:
    """Raises StartupError."""
    absent = StartupError(f"{config.model} is not on this machine: pagewire model pull {config.model}")
    if config.model in WHEEL_MODELS:
        path = cache_directory() / "models" / WHEEL_MODELS[config.model].file_name
        if not path.exists():
            raise absent
        return path
    if not is_of_hub(config.model):
        path = Path(config.model).expanduser()
        if path.is_dir() and not any(any(path.glob(files)) for files in _OF_MODELS):
            raise StartupError(f"{config.model} holds no model: it has none of {', '.join(_OF_MODELS)}")
        return path
    # Not by snapshot_download(), which reports a snapshot with a missing file as absent.
    name, cache = hub_name(config.model), config.download_dir and Path(config.download_dir)
    folder = None if name is None else snapshot(name.repository, config.revision, cache or None)
    if folder is None:
        raise absent
    return folder


def checked(path: Path, known: Any = None, *, quick: bool = False) -> list[Checked]:
    """Checks the files of a model. known: its entry in `WHEEL_MODELS`, if it has one."""
    if path.is_file():
        digest = (known.size, known.sha256) if isinstance(known, WheelModel) else None
        return [_check(path, path.name, digest, quick)]
    files = sorted(file for file in path.rglob("*") if file.is_file() or file.is_symlink())
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        found = list(pool.map(lambda file: _check(file, str(file.relative_to(path)), None, quick), files))
    return [*found, *_missing(path)]


def _check(path: Path, name: str, digest: tuple[int, str] | None, quick: bool) -> Checked:
    target = path.resolve()
    try:
        size = target.stat().st_size
        if digest is not None and size != digest[0]:
            return Checked(name, size, "size", f"it has {size} bytes instead of {digest[0]}")
        form = form_error(target, path.suffix)
        if form or quick:
            return Checked(name, size, "form", form)
        if digest is not None:
            return _compare(name, target, digest[1])
        if target.parent.name == "blobs" and _HASH.fullmatch(target.name):
            return _compare(name, target, target.name)
        return Checked(name, size, "form")
    except OSError as error:
        return Checked(name, 0, "form", f"it cannot be read ({error.strerror})")


def _compare(name: str, path: Path, digest: str) -> Checked:
    """Compares a file with the hash of its content: SHA-256 with 64 digits, Git's SHA-1 with 40."""
    size = path.stat().st_size
    if len(digest) == 64:
        how, hashed = "sha256", hashlib.sha256()
    else:
        how, hashed = "git sha1", hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
    found = hashed.hexdigest()
    return Checked(name, size, how, "" if found == digest else f"its {how} is {found}, expected {digest}")


def _missing(path: Path) -> Iterator[Checked]:
    """Yields findings about missing files: shards of an index, weights, the rest of a download."""
    for index in sorted(path.glob("*.safetensors.index.json")):
        try:
            places: dict[str, str] = dict(json.loads(index.read_bytes())["weight_map"].items())
            shards = sorted({f"{file}" for file in places.values()})
        except (ValueError, KeyError, TypeError, AttributeError):
            yield Checked(index.name, 0, "form", "it has no weight_map that names the file of each tensor")
            continue
        except OSError:
            continue  # a finding about the index itself
        for shard in shards:
            yield from _missing_in(path / shard, {name for name, file in places.items() if file == shard}, index.name)
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.gguf")):
        yield Checked("*.safetensors", 0, "form", "there are no weights")
    blobs = path.parent.parent / "blobs"
    if path.parent.name == "snapshots" and any(blobs.glob("*.incomplete")):
        yield Checked("*.incomplete", 0, "form", "a download was interrupted; `pagewire model pull` continues it")


def _missing_in(shard: Path, names: set[str], index: str) -> Iterator[Checked]:
    if not shard.is_file():
        yield Checked(shard.name, 0, "form", f"{index} names it, but it is missing")
        return
    try:
        lacking = sorted(names - safetensors_names(shard))
    except (ValueError, OSError):
        return  # a finding about the shard itself
    if lacking:
        yield Checked(shard.name, 0, "form", f"{index} names {lacking[0]} in it, which is missing")
