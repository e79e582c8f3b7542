"""Prometheus metrics of the tokenizer service."""

from prometheus_client import Counter, Gauge, Histogram

from pagewire.telemetry.loop_histogram import LoopCounter, LoopHistogram
from pagewire.telemetry.metrics import GENAI_DURATION_BUCKETS, GENAI_LABELS, LATENCY_BUCKETS
from pagewire.telemetry.recent import Latencies

_P = "pagewire:"


EXPIRED = Counter(
    _P + "tokenizer_prompts_expired", "Requests with a deadline that passed before their prompt was ready"
)
POOL_WORKERS = Gauge(_P + "tokenizer_pool_workers", "Tokenizer workers")
POOL_BUSY_WORKERS = Gauge(_P + "tokenizer_pool_busy_workers", "Tokenizer workers at work")
POOL_BUSY_SECONDS = Counter(
    _P + "tokenizer_pool_busy_seconds", "Time that workers worked; its rate over the number of workers is utilisation"
)
POOL_QUEUE_LENGTH = Gauge(_P + "tokenizer_pool_queue_length", "Jobs that wait for a tokenizer worker")
POOL_WAIT = Histogram(
    _P + "tokenizer_pool_wait_seconds", "Time that a job waited for a tokenizer worker", buckets=LATENCY_BUCKETS
)
POOL_WORKER_DEATHS = Counter(_P + "tokenizer_pool_worker_deaths", "Tokenizer worker processes that died at work")
POOL_REFUSALS = Counter(
    _P + "tokenizer_pool_refusals", "Requests refused because too many texts waited for a tokenizer worker"
)
POOL_GIVEN_UP = Counter(_P + "tokenizer_pool_given_up", "Texts that took longer than --prompt-timeout")
ENCODE_TIME = Histogram(
    _P + "tokenizer_encode_seconds",
    "Time to render and encode one prompt, without waiting, in the pool or (short texts) at once",
    buckets=LATENCY_BUCKETS,
)
IMAGES = Counter(_P + "tokenizer_images", "Images of chats, by outcome: read or refused", ["outcome"])
IMAGE_TIME = Histogram(
    _P + "tokenizer_image_seconds",
    "Time to decode an image and prepare it for the model, waiting for a worker included",
    buckets=LATENCY_BUCKETS,
)

REQUESTS_IN_FLIGHT = Gauge(_P + "tokenizer_requests_in_flight", "Requests of this service at the scheduler")
DETOKENIZED_TOKENS = LoopCounter(_P + "detokenized_tokens", "Output tokens turned into text")
STOP_STRING_HITS = Counter(_P + "stop_string_hits", "Requests ended by a stop string")
RESUBMISSIONS = Counter(_P + "tokenizer_resubmissions", "Requests sent again after the stream to the scheduler broke")
UNREAD_CANCELLATIONS = Counter(
    _P + "tokenizer_unread_cancellations", "Requests cancelled because their client did not read"
)

TIME_TO_FIRST_TOKEN = LoopHistogram(
    _P + "time_to_first_token_seconds", "Seconds from a request's arrival to its first token", LATENCY_BUCKETS
)
INTER_TOKEN_LATENCY = LoopHistogram(
    _P + "inter_token_latency_seconds", "Seconds between two deliveries of tokens to a request", LATENCY_BUCKETS
)
TIME_PER_OUTPUT_TOKEN = LoopHistogram(
    _P + "request_time_per_output_token_seconds",
    "Seconds per token of a request's output after its first one, on average over the request",
    LATENCY_BUCKETS,
)
E2E_LATENCY = LoopHistogram(
    _P + "e2e_request_latency_seconds", "Seconds from a request's arrival to its end", LATENCY_BUCKETS
)

# OpenTelemetry's, for GenAI.
GENAI_REQUEST_DURATION = LoopHistogram(
    "gen_ai_server_request_duration_seconds",
    "Seconds from a generation's arrival to its last token, or to its failure",
    GENAI_DURATION_BUCKETS,
    [*GENAI_LABELS, "error_type"],
)
GENAI_TIME_TO_FIRST_TOKEN = LoopHistogram(
    "gen_ai_server_time_to_first_token_seconds",
    "Seconds from a generation's arrival to its first token",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    GENAI_LABELS,
)
GENAI_TIME_PER_OUTPUT_TOKEN = LoopHistogram(
    "gen_ai_server_time_per_output_token_seconds",
    "Seconds per token of a generation after its first one, on average over the generation",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    GENAI_LABELS,
)

# For GetStatus.
RECENT_FIRST_TOKENS = Latencies()
RECENT_INTER_TOKEN = Latencies()
