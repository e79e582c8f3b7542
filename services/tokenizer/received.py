"""A request for text as it arrived, over a gateway's link or as a separate call."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.v1.common_pb2 import RequestContext, SamplingParams
from pagewire.v1.inference_link_pb2 import GenerateSubmission
from pagewire.v1.inference_pb2 import GenerateRequest
from pagewire.wire.rpc import deadline_of


@dataclass(frozen=True, slots=True)
class Received:
    """A request for one output. All choices of a request share its message, which is never copied or changed."""

    request: GenerateRequest
    context: RequestContext
    # The sampling parameters that the client gave, for this output.
    given: SamplingParams
    # By time.monotonic(); None: no deadline.
    deadline: float | None
    # Tokens that an earlier attempt at this request has delivered, and the version of the weights that made them.
    resume_token_ids: Sequence[int] = ()
    weights_version: str = ""
    # Digest of the adapter that made them; empty: the model names none, or any contents of that name will do.
    adapter_digest: str = ""
    # An earlier attempt at this request was admitted, so it is not refused if too many wait.
    resubmitted: bool = False

    def clamps(self, params: SamplingParams) -> bool:
        """Returns whether max_tokens of `params` is lowered to the room for it: it is a default, or the client asks."""
        return self.request.clamp_max_tokens or params.max_tokens != self.given.max_tokens

    @classmethod
    def of_call(cls, request: GenerateRequest, context: RequestContext) -> "Received":
        """Returns a request that arrives now as a separate call."""
        return cls(request, context, request.sampling_params, deadline_of(context))

    @classmethod
    def of_link(cls, submission: GenerateSubmission) -> "Received":
        """Returns a request that arrives now over a gateway's link."""
        return cls(
            submission.request,
            submission.context,
            submission.request.sampling_params,
            deadline_of(submission.context),
            submission.resume_token_ids,
            submission.weights_version,
            submission.adapter_digest,
            submission.resubmitted,
        )
