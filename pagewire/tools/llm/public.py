"""The names of this folder that `pagewire` exports."""

from pagewire.tools.llm.llm import LLM
from pagewire.tools.llm.prompts import LoRARequest, PoolingParams
from pagewire.tools.llm.sampling import BeamSearchParams, SamplingParams, StructuredOutputsParams

__all__ = ["LLM", "BeamSearchParams", "LoRARequest", "PoolingParams", "SamplingParams", "StructuredOutputsParams"]
