"""The seam for requests that the link to the tokenizer service does not generate (see `searches`)."""

from collections.abc import Sequence
from typing import Protocol

from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.core.reply import Line
from pagewire.v1.inference_pb2 import GenerateRequest


class Lines(Protocol):
    """The lines that generate outputs."""

    def line_of(self, requests: Sequence[GenerateRequest]) -> Line:
        """Returns what generates these requests: the link to the tokenizer service, or another line."""


LINES = AppState[Lines]("lines")
