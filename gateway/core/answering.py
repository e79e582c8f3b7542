"""The generations that this gateway answers, and the accounts of where their time went.

The gateway's part of an account is the whole of a request, from its head to the end of its answer.
"""

from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.core.request_context import RequestContext
from pagewire.telemetry.recent import Accounts
from pagewire.v1.admin_pb2 import RequestAccount


class Answering:
    """A generation that this gateway answers."""

    __slots__ = ("_context", "_tenant")

    def __init__(self, tenant: str, context: RequestContext) -> None:
        self._tenant, self._context = tenant, context

    @property
    def account_owner(self) -> tuple[str, str]:
        return self._tenant, self._context.request_id

    def account(self, *, has_ended: bool = False) -> RequestAccount:
        context = self._context
        return RequestAccount(
            service="gateway",
            request_id=context.request_id,
            trace_id=context.trace_id,
            seconds=context.elapsed,
            is_running=not has_ended,
        )


class Generations:
    """The generations that run, and the accounts of the latest ones that have ended."""

    def __init__(self) -> None:
        self._running: set[Answering] = set()
        self.accounts = Accounts(lambda: self._running)

    def begin(self, tenant: str, context: RequestContext) -> Answering:
        answering = Answering(tenant, context)
        self._running.add(answering)
        return answering

    def end(self, answering: Answering) -> None:
        self._running.remove(answering)
        self.accounts.add(answering.account_owner[0], answering.account(has_ended=True))


GENERATIONS = AppState[Generations]("generations")
