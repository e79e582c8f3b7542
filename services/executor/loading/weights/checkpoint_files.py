"""The files of a directory that hold a model's weights, under all names in use."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from pagewire.files.damaged_file import remedy
from pagewire.services.executor.config.load_error import ModelLoadError

_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_INDEX = "model.safetensors.index.json"
# Loads no code from the files, knows nothing of architectures, and leaves config and tokenizer where they are.
_CONVERT = """\
import glob, torch, safetensors.torch as s
s.save_file({{k: v.clone() for f in sorted(glob.glob({pattern!r}))
    for k, v in torch.load(f, map_location='cpu', weights_only=True).items()}}, {target!r}, {{'format': 'pt'}})"""


def checkpoint_files(directory: Path) -> list[Path]:
    """Raises ModelLoadError when there are none that can be read, or a shard is missing."""
    single, index = directory / "model.safetensors", directory / _INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        names = _indexed(index)
        return _present(directory, names, f"shards named in {index.name}")
    return _by_name(directory)


def conversion_command(directory: Path) -> str:
    """Returns the shell command that makes `model.safetensors` of `pytorch_model*.bin`."""
    pattern, target = str(directory / "pytorch_model*.bin"), str(directory / "model.safetensors")
    return f"python -c {shlex.quote(_CONVERT.format(pattern=pattern, target=target))}"


def _present(directory: Path, names: list[str], what: str) -> list[Path]:
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelLoadError(f"{directory}: {what} are missing: {', '.join(missing)}; download the model again")
    return [directory / name for name in names]


def _indexed(index: Path) -> list[str]:
    """Returns the names of files next to the index. Its places of tensors are not needed: the files list them."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(
            f"{index}: not a valid index of safetensors shards ({error!r}); {remedy(index)}"
        ) from error
    for name in names:
        if not isinstance(name, str) or name != Path(name).name:
            raise ModelLoadError(
                f"{index}: weight_map names {name!r:.200}, expected a file in the same folder; {remedy(index)}"
            )
    return names


def _by_name(directory: Path) -> list[Path]:
    """Without an index: all shards of one set, or the only file."""
    names = sorted(path.name for path in directory.glob("*.safetensors") if path.is_file())
    models = [name for name in names if not name.startswith(("consolidated", "adapter_"))]
    shards = [match for name in models if (match := _SHARD.fullmatch(name))]
    if shards and len({(shard[1], shard[3]) for shard in shards}) == 1:
        stem, width, count = shards[0][1], len(shards[0][2]), shards[0][3]
        expected = [f"{stem}-{number:0{width}}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
        return _present(directory, expected, "shards")
    if len(models) == 1:
        return [directory / models[0]]
    raise ModelLoadError(f"{directory}: {_why_not(directory, names, models)}")


def _why_not(directory: Path, names: list[str], models: list[str]) -> str:
    if models:
        return f"no {_INDEX} says which of {', '.join(models)} belong together; download it from where they came from"
    nothing = f"neither model.safetensors nor {_INDEX} is there"
    if any(name.startswith("consolidated") for name in names):
        return f"{nothing}; consolidated.safetensors is in Mistral's own format: use the model's model*.safetensors"
    if names:
        return f"{nothing}; {names[0]} is an adapter: merge it into its model first (peft: merge_and_unload)"
    if any(directory.glob("pytorch_model*.bin")):
        return (
            f"{nothing}; pytorch_model.bin, which may hold code, is not read. Convert it once:\n"
            f"{conversion_command(directory)}"
        )
    others = sorted(path.name for pattern in ("*.pth", "*.pt", "*.bin", "*.h5") for path in directory.glob(pattern))
    if others:
        return f"{nothing}; {others[0]} is not supported: use the model in Hugging Face layout, with safetensors"
    return f"{nothing}; download the model's weights, or start with --load-format dummy for random ones"
