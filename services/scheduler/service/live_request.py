"""A request, and the client that waits for it."""

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from pagewire.services.scheduler.observed import timeline
from pagewire.services.scheduler.observed.timeline import ADAPTER, GRAMMAR, QUEUE, Timeline
from pagewire.services.scheduler.service.request_output import RequestOutbox
from pagewire.services.scheduler.values.request import Request
from pagewire.telemetry.spans import Span
from pagewire.v1.admin_pb2 import RequestAccount


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request from its arrival until its end is delivered to the client."""

    request: Request
    outbox: RequestOutbox
    number: int  # given by the client
    external_id: str
    max_unread: int | None  # tokens and log probabilities in the outbox; None: no limit for a single request
    span: Span
    arrival_time: float
    first_step_time: float | None = None
    first_token_time: float | None = None
    # Compiles its grammar and loads its adapter, before the scheduler has the request.
    preparing: asyncio.Task[None] | None = None
    timeline: Timeline = field(init=False)

    def __post_init__(self) -> None:
        first = GRAMMAR if self.request.has_grammar else ADAPTER if self.request.adapter_digest else QUEUE
        self.timeline = Timeline(first, self.arrival_time)

    def goes_by(self, external_ids: Collection[str], tenant: str | None) -> bool:
        """Returns whether the request has one of these client-given ids and belongs to the tenant; None: to any."""
        return (
            bool(self.external_id) and self.external_id in external_ids and tenant in (None, self.request.tenant.name)
        )

    @property
    def account_owner(self) -> tuple[str, str]:
        return self.request.tenant.name, self.external_id

    def account(self, *, has_ended: bool = False) -> RequestAccount:
        """Returns where the time of the request went so far. has_ended: whether its timeline is closed."""
        now = None if has_ended else time.monotonic()
        trace_id = self.span.trace.trace_id
        return timeline.account(self.external_id, self.request, self.timeline, trace_id, self.first_token_time, now)

    @property
    def stage(self) -> str:
        """The stage that the request has reached: "waiting", "prompt" or "output"."""
        if self.first_step_time is None:
            return "waiting"
        return "prompt" if self.first_token_time is None else "output"
