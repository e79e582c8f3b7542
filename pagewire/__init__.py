"""Pagewire: LLM serving as four asynchronous gRPC services.

`pagewire.LLM` and `pagewire.SamplingParams` are for batch work from Python, `pagewire.client.Client` is for everything
else.
"""

from typing import TYPE_CHECKING, Any

from pagewire.version import __version__

if TYPE_CHECKING:
    from pagewire.tools.llm.public import (
        LLM,
        BeamSearchParams,
        LoRARequest,
        PoolingParams,
        SamplingParams,
        StructuredOutputsParams,
    )

__all__ = ["LLM", "BeamSearchParams", "LoRARequest", "PoolingParams", "SamplingParams", "StructuredOutputsParams"]
__all__ += ["__version__"]


def __getattr__(name: str) -> Any:
    """Imports names that need gRPC on first use, so that services and `--help` start without it."""
    if name in __all__:
        from pagewire.tools.llm import public

        return getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
