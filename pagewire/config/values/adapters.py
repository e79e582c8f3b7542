"""The values of the flags of adapters (LoRA)."""

from collections.abc import Collection, Iterator
from json import JSONDecoder
from pathlib import Path
from typing import NamedTuple

from pagewire.config.executor import ExecutorConfig
from pagewire.config.values.adapter_names import RULE, is_adapter_name
from pagewire.errors import StartupError


class LoraModule(NamedTuple):
    """An adapter that a flag names."""

    name: str
    path: str
    base_model: str = ""


def lora_modules(text: str) -> list[LoraModule]:
    """Returns the adapters of --lora-modules. Raises StartupError."""
    found, rest = list[LoraModule](), text.strip()
    while rest:
        try:
            if rest.startswith("{"):
                keys, end = JSONDecoder().raw_decode(rest)
                base = keys.pop("base_model_name", None) or ""
                module, rest = LoraModule(keys.pop("name"), keys.pop("path"), base), rest[end:].lstrip(" ,")
                is_right = not keys and all(isinstance(part, str) for part in module)
            else:
                one, _, rest = rest.partition(",")
                name, _, path = one.strip().partition("=")
                module, is_right, rest = LoraModule(name.strip(), path.strip()), True, rest.lstrip(" ,")
        except (ValueError, KeyError, RecursionError):
            is_right = False
        if not (is_right and module.name and module.path):
            raise StartupError(
                "--lora-modules: expected NAME=PATH, or a JSON object with name, path and perhaps base_model_name, "
                f"got {text!r:.200}"
            )
        if not is_adapter_name(module.name):
            raise StartupError(f"--lora-modules: the name {module.name!r:.100} cannot be used: {RULE}")
        if module.name in (other.name for other in found):
            raise StartupError(f"--lora-modules: {module.name!r:.100} is given twice; give each adapter its own name")
        found.append(module)
    return found


def refusals(config: ExecutorConfig) -> Iterator[str | None]:
    """Refuses flags of adapters that contradict each other. Raises StartupError."""
    lora_modules(config.lora_modules or "")
    if not config.enable_lora:
        for name in ("lora_modules", "lora_dir", "lora_experts"):
            if getattr(config, name):
                yield f"--{name.replace('_', '-')}: adapters are not served; add --enable-lora"
    is_here = config.distributed_executor_backend != "ray"
    if config.lora_dir is not None and is_here and not Path(config.lora_dir).is_dir():
        yield f"--lora-dir {config.lora_dir}: there is no such directory; make it, or leave the flag out"
    if config.max_cpu_loras is not None and config.max_cpu_loras < config.max_loras:
        yield (
            f"--max-cpu-loras {config.max_cpu_loras}: --max-loras {config.max_loras} adapters are in use at once; give "
            "at least as many"
        )


def names(config: ExecutorConfig) -> list[str]:
    """Returns the names of adapters that requests may give from the start. Raises StartupError."""
    found = [module.name for module in lora_modules(config.lora_modules or "")]
    if config.lora_dir is not None and Path(config.lora_dir).is_dir():
        found += sorted(path.name for path in Path(config.lora_dir).iterdir() if is_adapter_name(path.name))
    return found


def check_names(modules: str | None, of_model: Collection[str]) -> None:
    """Raises StartupError for an adapter of --lora-modules with a name of the model."""
    for module in lora_modules(modules or ""):
        if module.name in of_model:
            raise StartupError(
                f"--lora-modules: {module.name} is the name of the model; give the adapter another one, or the model "
                "with --served-model-name"
            )
