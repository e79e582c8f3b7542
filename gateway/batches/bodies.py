"""The bodies of the routes for batches, of requests and of answers."""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, UnsetType
from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, WithJsonSchema

from pagewire.gateway.core.body import Body
from pagewire.gateway.core.reading.bounded import BoundedModel
from pagewire.gateway.core.reading.names import Refused
from pagewire.gateway.files.bodies import MAX_EXPIRY_S, ExpiresAfter
from pagewire.gateway.schema.field import field, required
from pagewire.gateway.schema.parameters import Parameters

MAX_LISTED_BATCHES = 100
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


def window_seconds(window: str) -> int:
    """Returns the seconds of a time such as "24h", "30m" or "7d". Raises ValueError."""
    match = _WINDOW.fullmatch(window)
    if match is None:
        raise ValueError("expected a time such as `24h`, `30m` or `7d`")
    return int(match[1]) * _UNIT_S[match[2]]


def _window(window: str) -> str:
    if window_seconds(window) > MAX_EXPIRY_S:
        raise ValueError("expected at most 30 days")
    return window


class BatchRequest(Parameters):
    """`input_file_id` names an uploaded file; a line of it is
    `{"custom_id": "1", "method": "POST", "url": ENDPOINT, "body": {...}}`."""

    unsupported: ClassVar[Mapping[str, Refused]] = {}

    input_file_id: Annotated[str, StringConstraints(min_length=1)] = required("gateway", "The id of an uploaded file.")
    endpoint: str = required("gateway", "The route that all its lines name.")
    completion_window: Annotated[
        str, AfterValidator(_window), WithJsonSchema({"type": "string", "pattern": f"^{_WINDOW.pattern}$"})
    ] = required("gateway", "`24h`, `30m` or `7d`: lines without an answer by then fail. At most 30 days.")
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = field("gateway", "Labels, returned with the batch.")
    output_expires_after: ExpiresAfter | None = field("gateway", "When the output is deleted. Unset: after 30 days.")


class BatchQuery(BoundedModel):
    """A page of the batches, the newest first. `after` is the last id of the previous page."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_LISTED_BATCHES)] = 20


class BatchError(Body, kw_only=True):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(Body, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class BatchRequestCounts(Body, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchInputTokensDetails(Body, kw_only=True):
    cached_tokens: int


class BatchOutputTokensDetails(Body, kw_only=True):
    reasoning_tokens: int


class BatchUsage(Body, kw_only=True):
    input_tokens: int
    input_tokens_details: BatchInputTokensDetails
    output_tokens: int
    output_tokens_details: BatchOutputTokensDetails
    total_tokens: int


class Batch(Body, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchRequestCounts
    usage: BatchUsage | UnsetType = UNSET
    metadata: dict[str, str] | None = None


class BatchList(Body, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
