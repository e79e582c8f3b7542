"""The seam for generations that outlive their connection. The application has a keeper of them (see `kept`)."""

from collections.abc import Sequence
from typing import Protocol

from fastapi import Request

from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.core.outputs import ChoiceOutputs
from pagewire.gateway.core.reply import Line, PendingChoice
from pagewire.gateway.schema.generation import GenerationParameters
from pagewire.v1.common_pb2 import RequestContext
from pagewire.v1.inference_pb2 import GenerateRequest


class Outputs(Protocol):
    """The outputs that a response waits for, usually a `Reply`."""

    choices: list[PendingChoice]

    async def next(self) -> ChoiceOutputs: ...

    async def whole(self) -> ChoiceOutputs: ...

    def fail(self, error: BaseException) -> None: ...

    def abort(self) -> None: ...


class EventIds(Protocol):
    def added(self, pieces: Sequence[bytes]) -> list[bytes]:
        """Returns whole events with their ids, without those that the client has already."""


class Resumable(Protocol):
    """A generation that outlives its connection."""

    @property
    def id(self) -> str: ...

    @property
    def event_ids(self) -> EventIds: ...

    def generate(self, link: Line, requests: Sequence[GenerateRequest], context: RequestContext) -> Outputs:
        """Starts the generation, or follows it. Raises RpcError UNAVAILABLE."""


class Keeper(Protocol):
    """The resumable generations."""

    async def open(self, request: Request, body: GenerationParameters) -> Resumable | None:
        """Returns the generation that a request asks to keep or to continue, or None. Raises ApiError."""


KEEPER = AppState[Keeper]("keeper")
