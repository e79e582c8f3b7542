"""The lines that generate outputs: the link to the tokenizer service, and others for requests that do not use it."""

from collections.abc import Callable, Sequence

from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.core.reply import Line
from pagewire.v1.inference_pb2 import GenerateRequest


class Lines:
    """The link to the tokenizer service, and a separate line for each kind of request that does not use the link."""

    def __init__(self, link: Line, *others: tuple[Callable[[GenerateRequest], bool], Line]) -> None:
        """others: pairs of a test and the line for the requests that pass it."""
        self._link = link
        self._others = others

    def line_of(self, requests: Sequence[GenerateRequest]) -> Line:
        """Returns the line that generates these requests, which are of one kind."""
        return next((line for takes, line in self._others if takes(requests[0])), self._link)


LINES = AppState[Lines]("lines")
