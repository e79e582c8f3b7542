"""Attributes of spans, and histograms, by OpenTelemetry's conventions for GenAI and HTTP.

The gateway is the client in these conventions; the tokenizer service has the measurements of the server.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Scope

from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.generation.usage import UsageTotal
from pagewire.telemetry import semconv
from pagewire.telemetry.loop_histogram import LoopHistogram
from pagewire.telemetry.metrics import GENAI_DURATION_BUCKETS, GENAI_LABELS
from pagewire.telemetry.spans import Span
from pagewire.v1.inference_pb2 import GenerateRequest

OPERATION_DURATION = LoopHistogram(
    "gen_ai_client_operation_duration_seconds",
    "Seconds of a GenAI operation at the gateway, from the head of the request to the end of the answer",
    GENAI_DURATION_BUCKETS,
    [*GENAI_LABELS, "error_type"],
)
TOKEN_USAGE = LoopHistogram(
    "gen_ai_client_token_usage",
    "Tokens of a GenAI operation, by gen_ai_token_type: input (the prompt) or output",
    [4**power for power in range(14)],
    [*GENAI_LABELS, "gen_ai_token_type"],
)
# Operations without a name in the conventions have the closest one.
_OPERATIONS = {"generate": "text_completion", "embed": "embeddings"}


def operation_name(operation: str) -> str:
    return _OPERATIONS.get(operation, operation)


def http_attributes(scope: Scope, status: int) -> dict[str, Any]:
    """Returns the attributes of an HTTP request. status: of the answer; 0 if the client disconnected before it."""
    address, port = scope.get("server") or (None, None)
    return {
        "pagewire.client_request_id": request_context(scope).request_id,
        semconv.HTTP_METHOD: scope["method"],
        semconv.HTTP_ROUTE: getattr(scope.get("route"), "path", scope["path"]),
        semconv.HTTP_STATUS: status,
        semconv.URL_PATH: scope["path"],
        semconv.URL_SCHEME: scope["scheme"],
        semconv.SERVER_ADDRESS: address,
        semconv.SERVER_PORT: port,
        semconv.ERROR_TYPE: error_type(status),
    }


def error_type(status: int) -> str | None:
    """Returns the type of a server error; None for success and for errors of clients."""
    return str(status) if status >= 500 else None


def generation_attributes(
    requests: Sequence[GenerateRequest], operation: str, response_model: str, usage: UsageTotal
) -> dict[str, Any]:
    """Returns the attributes of a generation, successful or not."""
    request = requests[0]
    params = request.sampling_params
    # Rounded: floats of the gRPC request have 32 bits.
    sampling = {
        attribute: round(getattr(params, name), 6)
        for name, attribute in semconv.REQUEST_SAMPLING.items()
        if params.HasField(name)
    }
    return sampling | {
        semconv.OPERATION_NAME: operation_name(operation),
        semconv.PROVIDER_NAME: semconv.PROVIDER,
        semconv.OUTPUT_TYPE: "json" if params.HasField("grammar") else "text",
        semconv.REQUEST_MODEL: request.model or None,
        semconv.REQUEST_STOP_SEQUENCES: list(request.stop) or None,
        semconv.RESPONSE_MODEL: response_model or None,
        semconv.USAGE_INPUT_TOKENS: usage.prompt_tokens,
        semconv.USAGE_OUTPUT_TOKENS: usage.completion_tokens,
        semconv.USAGE_CACHED_TOKENS: usage.cached_tokens,
        semconv.USAGE_REASONING_TOKENS: usage.reasoning_tokens or None,
    }


def observe(
    span: Span, operation: str, models: tuple[str, str], seconds: float, status: int, tokens: Mapping[str, int]
) -> None:
    """Records an operation in the histograms.

    Args:
        models: the models of the request and of the response; both "" if the model is not served, as clients could
            create any number of series.
        tokens: the counts by gen_ai.token.type.
    """
    labels = (operation_name(operation), semconv.PROVIDER, *models)
    OPERATION_DURATION.labels(*labels, error_type(status) or "").observe(seconds, span.exemplar)
    for kind, number in tokens.items():
        TOKEN_USAGE.labels(*labels, kind).observe(number)
