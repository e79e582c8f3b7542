"""The gateway's own metrics."""

from prometheus_client import Counter, Gauge

from pagewire.telemetry.loop_histogram import LoopHistogram
from pagewire.telemetry.metrics import LATENCY_BUCKETS

HTTP_REQUESTS = Counter(
    "pagewire:http_requests",
    "HTTP requests answered, by status, without probes and scrapes (pagewire:http_probes).",
    ["method", "route", "status"],
)
HTTP_PROBES = Counter(
    "pagewire:http_probes",
    "HTTP requests of probes and scrapers answered, by status.",
    ["route", "status"],
)
HTTP_DURATION = LoopHistogram(
    "pagewire:http_request_duration_seconds",
    "Seconds from the head of a request to the last byte of its response, without probes and scrapes.",
    LATENCY_BUCKETS,
    ["method", "route"],
)
HTTP_IN_FLIGHT = Gauge("pagewire:http_requests_in_flight", "HTTP requests being answered, without probes and scrapes.")
TIME_TO_FIRST_TOKEN = LoopHistogram(
    "pagewire:gateway_time_to_first_token_seconds",
    "Seconds from the head of a request to the first output of a streamed generation, measured at the gateway.",
    LATENCY_BUCKETS,
    ["operation"],
)
E2E_LATENCY = LoopHistogram(
    "pagewire:gateway_e2e_request_latency_seconds",
    "Seconds from the head of a request to the end of a successful generation or its vectors, at the gateway.",
    LATENCY_BUCKETS,
    ["operation"],
)
REQUEST_CHOICES = LoopHistogram(
    "pagewire:request_params_n",
    "Choices of a generation request (n), for each prompt.",
    (1, 2, 5, 10, 20),
)
RESUBMISSIONS = Counter(
    "pagewire:gateway_resubmitted_requests", "Requests submitted again after the stream to the tokenizer broke."
)
CLIENTS_GONE = Counter("pagewire:gateway_clients_gone", "Responses that ended because the client disconnected.")
HTTP_CONNECTIONS = Gauge(
    "pagewire:http_connections",
    "Open HTTP connections: idle, sending a head or a body, or waiting for an answer.",
    ["phase"],
)
HTTP_CONNECTION_LIMIT = Gauge("pagewire:http_connection_limit", "Limit of HTTP connections that this process accepts.")
HTTP_CONNECTIONS_CLOSED = Counter(
    "pagewire:http_connections_closed",
    "HTTP connections closed by the gateway: refused, to make room, too slow, or not HTTP.",
    ["reason"],
)
