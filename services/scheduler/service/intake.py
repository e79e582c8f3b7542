"""The length check before a request is taken in, and the statuses of requests that are refused or ended."""

import grpc

from pagewire.config.sampling_checks import check_room
from pagewire.errors import InvalidRequest
from pagewire.services.scheduler.core.scheduler import QueueFull
from pagewire.services.scheduler.observed import stats
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.services.scheduler.values.lengths import too_long
from pagewire.v1.scheduler_link_pb2 import TokenSubmission
from pagewire.v1.scheduler_pb2 import TokenRequest
from pagewire.wire.rpc import RpcError


def check_length(submission: TokenSubmission, info: ExecutorInfo | None, is_served: bool) -> None:
    """Refuses a prompt that is too long before it takes time on the event loop, or memory while it waits for an
    executor that may never take it, and a request for more output than the context has room for.

    info: the facts about the attached executors, else about the last one. is_served: whether an executor is attached.
    Raises RpcError.
    """
    message = submission.request
    num_tokens = len(message.prompt_token_ids)
    if info is None:
        return
    if num_tokens <= info.max_prompt_tokens(message.yields_vector):
        # Without an executor, the next one judges: it may have more room.
        if is_served and not message.yields_vector and not submission.resubmitted:
            _check_room(message, info)
        return
    if is_served:
        too_many = too_long(num_tokens, info, message.yields_vector)
        raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, too_many, [("prompt_token_ids", too_many)])
    if not submission.resubmitted:
        raise RpcError(
            grpc.StatusCode.UNAVAILABLE,
            "no executor is available, and the last one took prompts of up to "
            f"{info.max_prompt_tokens(message.yields_vector)} tokens; this one has {num_tokens}; try again later",
        )


def _check_room(message: TokenRequest, info: ExecutorInfo) -> None:
    """Raises RpcError if the output that the client asks for does not fit behind the prompt."""
    clamps = message.clamp_max_tokens
    try:
        check_room(message.sampling_params, len(message.prompt_token_ids), info.max_num_tokens, clamps=clamps)
    except InvalidRequest as error:
        raise status_of(error) from error


def status_of(error: Exception, retry_delay: float | None = None) -> RpcError:
    """Returns the status of a request that was not taken in. retry_delay: seconds; None: unknown."""
    if isinstance(error, RpcError):
        return error
    if isinstance(error, InvalidRequest):
        return RpcError(grpc.StatusCode.INVALID_ARGUMENT, str(error), error.violations)
    assert isinstance(error, QueueFull)
    stats.REFUSALS.labels("queue_full").inc()
    return RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), retry_delay=retry_delay)


def crashed_executors(num_losses: int, reason: str) -> RpcError:
    """Returns the status of a request that makes executors fail."""
    message = (
        f"this request was ended, because the executor failed {num_losses} times while it ran this request, the last "
        f"time without other requests ({reason}); see the executor's log"
    )
    return RpcError(grpc.StatusCode.INTERNAL, message)
