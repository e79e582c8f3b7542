"""The head of an answer."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

from fastapi import Request
from msgspec import UNSET, UnsetType

from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.generation.lines import LINES
from pagewire.gateway.generation.style import STYLE, AnswerStyle
from pagewire.gateway.generation.timing import RequestMetrics, Timing
from pagewire.gateway.schema.sglang import SglangParameters


@dataclass(frozen=True)
class Head:
    """The first members of an answer and of all its chunks."""

    id: str
    created: int  # Unix time, seconds
    model: str
    style: AnswerStyle
    timing: Timing | None = None  # with --enable-per-request-metrics

    @property
    def metrics(self) -> RequestMetrics | UnsetType | None:
        """The member `metrics` of the answer."""
        return UNSET if self.timing is None else self.timing.metrics


class NamedBody(Protocol):
    """A body that may name a model, and an id for its answer."""

    model: str | None
    request_id: str | None


async def head_of(request: Request, body: NamedBody, prefix: str) -> Head:
    """Returns the head of an answer. prefix: of its id, as "chatcmpl". Raises grpc.aio.AioRpcError or ApiError."""
    context, lines, style = request_context(request.scope), LINES.of(request), STYLE.of(request)
    if body.request_id is not None and "x-request-id" not in request.headers:
        context.request_id = body.request_id
    if isinstance(body, SglangParameters):
        await body.check_model(partial(lines.list_models, body.model or ""))
    return Head(
        id=f"{prefix}-{context.request_id}",
        created=context.created,
        model=await lines.name_of(body.model),
        style=style,
        timing=Timing(await lines.client(body.model)) if style.has_metrics else None,
    )
