"""Pagewire: LLM serving as four asynchronous gRPC services.

`pagewire.LLM` and `pagewire.SamplingParams` are for batch work from Python, `pagewire.client.Client` is for everything
else.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pagewire.version import __version__

if TYPE_CHECKING:
    from pagewire.tools.llm.llm import LLM as LLM
    from pagewire.tools.llm.prompts import LoRARequest as LoRARequest
    from pagewire.tools.llm.prompts import PoolingParams as PoolingParams
    from pagewire.tools.llm.sampling import BeamSearchParams as BeamSearchParams
    from pagewire.tools.llm.sampling import SamplingParams as SamplingParams
    from pagewire.tools.llm.sampling import StructuredOutputsParams as StructuredOutputsParams

_MODULES = {
    "LLM": "llm",
    "LoRARequest": "prompts",
    "PoolingParams": "prompts",
    "BeamSearchParams": "sampling",
    "SamplingParams": "sampling",
    "StructuredOutputsParams": "sampling",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "LoRARequest",
    "PoolingParams",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Imports names that need gRPC on first use, so that services and `--help` start without it."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"pagewire.tools.llm.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
