"""Pagewire: LLM serving as four asynchronous gRPC services.

`pagewire.LLM` and `pagewire.SamplingParams` are for batch work from Python, `pagewire.client.Client` is for everything
else.
"""

from typing import TYPE_CHECKING, Any

from pagewire.version import __version__

if TYPE_CHECKING:
    from pagewire.tools.llm.llm import LLM as LLM
    from pagewire.tools.llm.sampling import SamplingParams as SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports names that need gRPC on first use, so that services and `--help` start without it."""
    if name == "LLM":
        from pagewire.tools.llm.llm import LLM

        return LLM
    if name == "SamplingParams":
        from pagewire.tools.llm.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
