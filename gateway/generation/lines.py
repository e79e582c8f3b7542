"""The seam for the lines of several models, each with tokenizer services of its own (see `models`)."""

from collections.abc import Awaitable, Sequence
from typing import Protocol

from starlette.types import Send

from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.core.outputs import ChoiceOutputs
from pagewire.gateway.core.reply import Line
from pagewire.gateway.core.request_context import RequestContext
from pagewire.gateway.core.tokenizer_client import TokenizerClient
from pagewire.v1.inference_pb2 import Model


class Lines(Line, Protocol):
    """All lines as one: each request goes to that of its model."""

    async def client(self, model: str | None) -> TokenizerClient:
        """Returns the services of the model that a request names, or of the default one. Raises ApiError 404, 503."""

    async def name_of(self, model: str | None) -> str:
        """Returns the model that an answer reports: that of the request, or the default one. Raises ApiError 503."""

    async def list_models(self, model: str) -> Sequence[Model]:
        """Returns the models, adapters and aliases of the line that serves a name. Raises like client()."""

    def served_name(self, model: str, *, answered: bool) -> str:
        """Returns the model for metrics; "" if a request that was not answered names one that is not known."""

    def waits(self, model: str) -> str:
        """Returns what a request for the model waits for before it can run: "loading NAME"; "" = for nothing."""

    async def first_outputs(
        self, outputs: Awaitable[ChoiceOutputs], model: str, context: RequestContext, send: Send
    ) -> ChoiceOutputs:
        """Returns the first outputs of a stream of events, and sends comments while it waits. send: for the head."""


LINES = AppState[Lines]("lines")
