"""Limits of the number of outputs."""

from pagewire.config.sampling_params import MAX_CHOICES
from pagewire.services.tokenizer.errors import invalid


def checked_count(name: str, count: int) -> int:
    """Returns the count. Raises RpcError (INVALID_ARGUMENT) if it is not possible."""
    if not 1 <= count <= MAX_CHOICES:
        raise invalid(f"{name} is {count}; it must be within 1..{MAX_CHOICES}", name)
    return count
