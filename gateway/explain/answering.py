"""The gateway's part of an account: the whole of a request, from its head to the end of its answer."""

from pagewire.gateway.core.request_context import RequestContext
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
