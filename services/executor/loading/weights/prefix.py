"""A model's names of tensors, for checkpoints with different prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Modules outside the body. A tied head may be stored, too.
HEADS = ("lm_head", "embed_out")


def renamed(stored: Iterable[str], prefixes: Mapping[str, str], base: str) -> dict[str, str]:
    """Names in a checkpoint -> the model's; prefixes and base: see `Architecture`.

    A model that is saved without its head has `layers.0.…` instead of `model.layers.0.…`, and one that is wrapped has
    `module.model.layers.0.…`.
    """
    names = {name: _with_prefix(prefixes, name) for name in stored}
    wrapping = max((name[: name.rfind(f".{base}") + 1] for name in names.values()), key=len, default="")
    if wrapping:
        return {old: name.removeprefix(wrapping) for old, name in names.items()}
    if any(name.startswith(base) for name in names.values()):
        return names
    return {old: name if name.startswith(HEADS) else base + name for old, name in names.items()}


def _with_prefix(prefixes: Mapping[str, str], name: str) -> str:
    """Returns the name with the first matching prefix (old -> new) replaced."""
    old = next((old for old in prefixes if name.startswith(old)), "")
    return prefixes.get(old, "") + name.removeprefix(old)
