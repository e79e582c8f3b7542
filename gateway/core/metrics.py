"""The gateway's own metrics."""

from prometheus_client import Counter, Gauge

from pagewire.telemetry.loop_histogram import LoopHistogram
from pagewire.telemetry.metrics import LATENCY_BUCKETS

HTTP_REQUESTS = Counter(
    "pagewire:http_requests",
    "HTTP requests answered, by status; without those of probes and scrapers (pagewire:http_probes).",
    ["method", "route", "status"],
)
HTTP_PROBES = Counter(
    "pagewire:http_probes",
    "HTTP requests of probes and of scrapers that were answered, by status.",
    ["route", "status"],
)
HTTP_DURATION = LoopHistogram(
    "pagewire:http_request_duration_seconds",
    "Seconds from the request's head to the response's last byte, without those of probes and scrapers.",
    LATENCY_BUCKETS,
    ["method", "route"],
)
HTTP_IN_FLIGHT = Gauge("pagewire:http_requests_in_flight", "HTTP requests being answered, those of probes left out.")
TIME_TO_FIRST_TOKEN = LoopHistogram(
    "pagewire:gateway_time_to_first_token_seconds",
    "Seconds from the request's head to the first output of a generation, as the gateway sees it; of streams only.",
    LATENCY_BUCKETS,
    ["operation"],
)
E2E_LATENCY = LoopHistogram(
    "pagewire:gateway_e2e_request_latency_seconds",
    "Seconds from the request's head to the end of a successful generation, or to its vectors, as the gateway sees it.",
    LATENCY_BUCKETS,
    ["operation"],
)
REQUEST_CHOICES = LoopHistogram(
    "pagewire:request_params_n",
    "Outputs that one generation request asks for (n), those of its other prompts left out.",
    (1, 2, 5, 10, 20),
)
RESUBMISSIONS = Counter(
    "pagewire:gateway_resubmitted_requests", "Requests submitted again after the stream to the tokenizer broke."
)
CLIENTS_GONE = Counter("pagewire:gateway_clients_gone", "Responses whose client went away before their end.")
HTTP_CONNECTIONS = Gauge(
    "pagewire:http_connections",
    "Open HTTP connections: idle, sending a head or a body, or waiting for an answer.",
    ["phase"],
)
HTTP_CONNECTION_LIMIT = Gauge("pagewire:http_connection_limit", "HTTP connections that this process takes.")
HTTP_CONNECTIONS_CLOSED = Counter(
    "pagewire:http_connections_closed",
    "HTTP connections closed by the gateway: refused or to make room, for being late, or for what is not HTTP.",
    ["reason"],
)
