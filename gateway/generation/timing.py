"""The times of a generation in its answer, with --enable-per-request-metrics: the scheduler's account of it."""

import asyncio
from itertools import chain

from pagewire.gateway.core.body import Body
from pagewire.gateway.core.tokenizer_client import TokenizerClient
from pagewire.v1.admin_pb2 import ExplainRequestRequest, RequestAccount
from pagewire.wire import tenants
from pagewire.wire.admin import accounts_behind

# Before the first step of a request.
_BEFORE = ("grammar", "queue")


class RequestMetrics(Body, kw_only=True):
    """Times of one output. `queue_time_ms`: until its first step. `time_to_first_token_ms`: from there to the first
    token. `generation_time_ms`: from there to the last one. `mean_itl_ms`: between two tokens. `tokens_per_second`:
    from the first step to the last token."""

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None


class Timing:
    """The times of one answer. `metrics` is None until they are measured, and for an answer with several outputs."""

    def __init__(self, tokenizer: TokenizerClient) -> None:
        self.metrics: RequestMetrics | None = None
        self._tokenizer = tokenizer

    async def measure(self, request_id: str, num_outputs: int) -> None:
        """Asks the services once the output is complete. Values that none of them knows are None."""
        if num_outputs != 1:
            return
        wanted = ExplainRequestRequest(request_id=request_id, tenant=tenants.caller_scope())
        found = await asyncio.gather(*(accounts_behind(one, wanted) for one in self._tokenizer.neighbours()))
        accounts = [one for one in chain.from_iterable(found) if one.service == "scheduler"]
        self.metrics = metrics_of(accounts[-1]) if accounts else RequestMetrics()


def metrics_of(account: RequestAccount) -> RequestMetrics:
    """Returns the times in a scheduler's account of a request that has ended."""
    queue = sum(phase.seconds for phase in account.phases if phase.name in _BEFORE)
    first, count = account.first_token_seconds, account.usage.completion_tokens
    if not first or not count:
        return RequestMetrics(queue_time_ms=1000 * queue)
    generation = max(0.0, sum(phase.seconds for phase in account.phases) - first)
    computing = first - queue + generation
    return RequestMetrics(
        time_to_first_token_ms=1000 * max(0.0, first - queue),
        generation_time_ms=1000 * generation,
        queue_time_ms=1000 * queue,
        mean_itl_ms=1000 * generation / (count - 1) if count > 1 else None,
        tokens_per_second=count / computing if computing > 0 else None,
    )
