"""Models of the Hub by id: their names, the choice of a GGUF file, download and cache."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pagewire.errors import ModelNotFoundError
from pagewire.files.model_files import gguf_splits

_FILES = ("*.safetensors", "*.json", "*.model", "*.tiktoken", "*.jinja", "*.txt")
_HOST = r"(?:(?:https://)?(?P<host>hf\.co|huggingface\.co)/)?"
_NAME = re.compile(_HOST + r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?::(?P<gguf>[\w.-]+(?:/[\w.-]+)*))?")
_LATEST = "latest"
# What llama.cpp takes of several quantizations; otherwise the first file.
_DEFAULTS = ("Q4_K_M", "Q4_0")
# Parts of names of files that are no models: encoders of images, and statistics of a quantization.
_NO_MODELS = ("mmproj", "imatrix")
_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")
_QUANTIZATION = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*))(?=[-.])", re.IGNORECASE)

# (name of a file, bytes so far, bytes in all; 0: unknown)
OnProgress = Callable[[str, int, int], None]


class HubName(NamedTuple):
    """A model of the Hub. gguf: the name of a quantization or of a file; "" = the default; None = safetensors if there
    are any, otherwise the default."""

    repository: str
    gguf: str | None

    def __str__(self) -> str:
        return f"{self.repository}:{self.gguf}" if self.gguf else self.repository


def hub_name(model: str, gguf: str | None = None) -> HubName | None:
    """Returns the name that MODEL is on the Hub: ORG/REPO, ORG/REPO:QUANT, or either after hf.co/; None for any other
    form.

    gguf: that of --gguf. Raises ModelNotFoundError if it is another one than the model's.
    """
    found = _NAME.fullmatch(model)
    if found is None or (found["host"] is None and found["gguf"] is None and model.endswith(".gguf")):
        return None
    named = found["gguf"]
    if named is not None and gguf is not None and named != gguf:
        raise ModelNotFoundError(f"{model}: --gguf names another file; leave one of them out")
    named = gguf if named is None else named
    if named is None:
        return HubName(found["repository"], None if found["host"] is None else "")
    return HubName(found["repository"], "" if named.lower() == _LATEST else named)


def choose_gguf(files: Iterable[str], wanted: str) -> list[str]:
    """Returns the file that llama.cpp takes, with its other parts if it is one of several. files: of the repository.
    wanted: a quantization or a file; "" = Q4_K_M, else Q4_0, else the first.

    Raises ModelNotFoundError, with a message that follows the name of the repository.
    """
    names = sorted(name for name in files if name.endswith(".gguf"))
    firsts = [name for name in names if (part := _PART.search(name)) is None or int(part[1]) == 1]
    models = [name for name in firsts if not any(word in name.lower() for word in _NO_MODELS)]
    if not models:
        raise ModelNotFoundError("has no GGUF file of a model")
    if wanted.endswith(".gguf"):
        chosen = next((name for name in firsts if wanted in (name, Path(name).name)), None)
    elif wanted:
        chosen = _with_quantization(models, wanted)
    else:
        chosen = next((name for one in _DEFAULTS if (name := _with_quantization(models, one))), models[0])
    if chosen is None:
        there = ", ".join(dict.fromkeys(_label(name) for name in models))
        raise ModelNotFoundError(f"has no GGUF file {wanted!r}; it has {there}")
    parts = [str(part) for part in gguf_splits(Path(chosen))]
    if missing := [part for part in parts if part not in names]:
        raise ModelNotFoundError(f"has only some parts of {chosen}: {missing[0]} is missing")
    return parts


def _with_quantization(names: Sequence[str], wanted: str) -> str | None:
    pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}[.-]", re.IGNORECASE)
    return next((name for name in names if pattern.search(name)), None)


def _label(name: str) -> str:
    """Returns the quantization in the name of a file, or the name."""
    found = _QUANTIZATION.findall(name)
    return found[-1] if found else name


def snapshot(repository: str, revision: str | None, cache: Path | None) -> Path | None:
    """Returns the folder of a revision in the Hub's cache, perhaps without some of its files; None: it has none."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return None
    root = (cache or Path(constants.HF_HUB_CACHE)).expanduser() / f"models--{repository.replace('/', '--')}"
    reference = root / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    folder = root / "snapshots" / (commit or "main")
    return folder if folder.is_dir() else None


def cached(name: HubName, revision: str | None, cache: Path | None) -> Path | None:
    """Returns the model's directory or .gguf file in the Hub's cache; None if it is not there."""
    folder = snapshot(name.repository, revision, cache)
    if folder is None or (name.gguf is None and (folder / "config.json").is_file()):
        return folder
    files = (str(file.relative_to(folder)) for file in folder.rglob("*.gguf"))
    try:
        return folder / choose_gguf(files, name.gguf or "")[0]
    except ModelNotFoundError:
        return None


def from_hub(
    name: HubName,
    revision: str | None,
    cache: Path | None,
    *,
    pickled: bool = False,
    on_progress: OnProgress | None = None,
) -> Path:
    """Returns the model's directory or .gguf file, and downloads it unless it is in the cache.

    Without a connection, the cache is enough. Raises ModelNotFoundError.
    """
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError as error:
        raise ModelNotFoundError(
            f"{name}: no such file or directory, and hub ids need huggingface_hub: pip install 'pagewire[executor]'"
        ) from error
    bar: Any = {} if on_progress is None else {"tqdm_class": progress_bar(on_progress)}
    download = partial(snapshot_download, name.repository, revision=revision, cache_dir=cache, **bar)
    try:
        there = [one.rfilename for one in HfApi().model_info(name.repository, revision=revision).siblings or ()]
        files, is_gguf = _wanted(there, name, pickled=pickled)
        folder = Path(download(allow_patterns=files))
        return folder / files[0] if is_gguf else folder
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{name.repository} {error}") from error
    # Errors of the hub, HTTP errors and broken connections only have Exception as a common base.
    except Exception as error:
        is_refused = isinstance(error, RepositoryNotFoundError | RevisionNotFoundError | GatedRepoError)
        if not is_refused and (path := cached(name, revision, cache)) is not None:
            return path
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ModelNotFoundError(
            f"{name}: no such file or directory, and the hub did not provide it ({type(error).__name__}: {reason})."
            " Check the name and the connection, log in with `hf auth login` if it is private, or name a model on disk"
        ) from error


def _wanted(there: Sequence[str], name: HubName, *, pickled: bool) -> tuple[list[str], bool]:
    """Returns the files to download, and whether they are one model in GGUF. Raises ModelNotFoundError."""
    has_weights = any(file.endswith((".safetensors", ".bin")) for file in there)
    if name.gguf is None and "config.json" in there and has_weights:
        return [*_FILES, *["pytorch_model.bin"] * pickled], False
    if name.gguf is None and not any(file.endswith(".gguf") for file in there):
        if "config.json" in there:
            return list(_FILES), False
        raise ModelNotFoundError("has neither config.json nor a GGUF file: name another repository")
    return choose_gguf(there, name.gguf or ""), True


def progress_bar(on_progress: OnProgress) -> type:
    """Returns a class of progress bars for huggingface_hub that reports the bytes of its bars and shows nothing."""
    from tqdm.auto import tqdm

    class Reported(tqdm):  # type: ignore[type-arg, misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            options.pop("name", None)
            with open(os.devnull, "w") as nowhere:  # noqa: PTH123
                super().__init__(*args, **options | {"file": nowhere, "disable": False, "mininterval": 1e9})

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self._counts_bytes:
                on_progress(str(self.desc or ""), int(self.n), int(self.total or 0))
            return None

        def refresh(self, *_: Any, **__: Any) -> None:
            """Shows nothing."""

        def close(self) -> None:
            """Shows nothing."""

    return Reported
