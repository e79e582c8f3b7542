"""Tensors under the names that a model has for them: with one prefix more or less than a checkpoint has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

Rename = Callable[[str], str]


def with_prefix(prefixes: Mapping[str, str], name: str) -> str:
    """The name with the first of the prefixes (old -> new) that it has replaced."""
    old = next((old for old in prefixes if name.startswith(old)), "")
    return prefixes.get(old, "") + name.removeprefix(old)


def renaming(stored: Iterable[str], expected: Mapping[str, object]) -> Rename | None:
    """From names in a checkpoint to those of its model; None where they agree.

    Whoever saves a model without its head saves `layers.0.…` instead of `model.layers.0.…`, and whoever wraps it saves
    `module.model.layers.0.…`. Names of other parts (`lm_head.weight`) stay.
    """
    names = set(stored)
    landmark = next((name for name in expected if ".0." in name), None)  # in the first layer
    if landmark is None or landmark in names:
        return None
    longer = next((name for name in names if name.endswith(f".{landmark}")), None)
    if longer is not None:
        more = longer.removesuffix(landmark)
        return lambda name: name.removeprefix(more)
    shorter = next((name for name in names if landmark.endswith(f".{name}") and ".0." in f".{name}"), None)
    if shorter is not None:
        less = landmark.removesuffix(shorter)
        # a head stands beside the body, and may be stored although it is tied
        return lambda name: name if name in expected or name.startswith("lm_head.") else less + name
    return None
