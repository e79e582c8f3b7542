"""The interface through which reasoning and tool calls enter the path of a request for text.

`generation/` and `output/` use only these protocols; `main.py` passes their implementation (`parsers/`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagewire.v1.common_pb2 import SamplingParams
from pagewire.v1.inference_pb2 import GenerateRequest, ToolCallDelta


@dataclass(slots=True)
class Parsed:
    """The parts of a piece of output."""

    reasoning: str = ""
    text: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    @property
    def is_text(self) -> bool:
        """True if it is text and nothing else."""
        return not self.reasoning and not self.tool_calls


class OutputReader(Protocol):
    """Reads the text of one output."""

    @property
    def has_called(self) -> bool:
        """True once the output has called tools, and ends for that reason."""

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens of reasoning until now."""

    def push(self, *texts: str) -> Parsed:
        """Returns the parts that are certain after these texts, one for each token."""

    def finish(self, *texts: str, rest: str = "") -> Parsed:
        """Returns the same for the last texts, and all held text. rest: text of these or of earlier tokens."""


class OutputReading(Protocol):
    """Prepares requests so that their outputs can be read, and makes the readers."""

    def marks(self, request: GenerateRequest) -> frozenset[str]:
        """Returns the special tokens that must stay in the text, as the reader looks for them."""

    def constrain(self, request: GenerateRequest, params: SamplingParams) -> None:
        """Adds the grammar of tool calls to `params`. Raises RpcError (INVALID_ARGUMENT)."""

    def on_prompt(self, request: GenerateRequest, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """Adds to `params` what follows from the encoded prompt. Raises RpcError (INVALID_ARGUMENT)."""

    def reader(self, request: GenerateRequest, prompt_token_ids: Sequence[int]) -> OutputReader | None:
        """Returns a reader for one output; None if all of it is text."""
