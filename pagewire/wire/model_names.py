"""The names that requests may give as their model."""

from collections.abc import Collection, Sequence
from itertools import islice

_MAX_SHOWN = 20


def names_of(models: Sequence[str], adapters: Sequence[str]) -> list[str]:
    """Returns all names: those of the model, its adapters, and `model:adapter` for each."""
    return [*models, *adapters, *(f"{model}:{adapter}" for model in models for adapter in adapters)]


def unservable(adapter: str, why: str) -> str:
    """Returns the message about an adapter that is there and cannot be served."""
    return f"the adapter {adapter!r:.100} cannot be served: {why}"


def not_served(model: str, served: Collection[str]) -> str:
    """Returns the message about a name that stands for nothing."""
    more = f" and {len(served) - _MAX_SHOWN} more" if len(served) > _MAX_SHOWN else ""
    return f"the model {model!r:.100} does not exist; served here: {', '.join(islice(served, _MAX_SHOWN))}{more}"
