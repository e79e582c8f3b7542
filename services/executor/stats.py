"""Metrics of the executor and the spans of traced requests."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from pagewire.services.executor.device.clock import StageTimes
from pagewire.services.executor.step.step import HostTokens, Step
from pagewire.telemetry import semconv
from pagewire.telemetry.loop_histogram import LoopHistogram
from pagewire.telemetry.metrics import LATENCY_BUCKETS
from pagewire.telemetry.spans import Span, tracing

_STEPS = Counter("pagewire:executor_steps", "Steps executed, by what they computed", ["kind"])
GRAPH_STEPS = Counter(
    "pagewire:executor_graph_steps",
    "Steps executed, by how they were launched: captured (into a CUDA graph, or recorded on a CPU), replayed, eager; "
    "and by what they computed, as executor_steps",
    ["mode", "kind"],
)
CUDA_GRAPHS = Counter(
    "pagewire:executor_cuda_graphs",
    "Shapes of steps with CUDA graphs, captured before the first request; none on a CPU and with --enforce-eager",
    ["status"],
)
CUDA_GRAPHS.labels("captured")
IMAGES = Counter(
    "pagewire:executor_images",
    "Images of prompts: encoded by the vision tower, or found encoded",
    ["how"],
)
GRAMMARS = Counter(
    "pagewire:executor_grammars", "Grammars that requests had: compiled for them, or found compiled (cached)", ["how"]
)
GRAMMAR_COMPILE_SECONDS = Histogram(
    "pagewire:executor_grammar_compile_seconds",
    "Time to compile a grammar, refused ones included",
    buckets=LATENCY_BUCKETS,
)
GRAMMAR_MASK_SECONDS = Histogram(
    "pagewire:executor_grammar_mask_seconds",
    "Time to find the tokens that may follow, of all requests of a step that have a grammar or a thinking budget",
    buckets=LATENCY_BUCKETS,
)
CONSTRAINED_REQUESTS = Gauge(
    "pagewire:executor_constrained_requests", "Requests with a grammar or a thinking budget that hold a row"
)
FAILED_REQUESTS = Counter(
    "pagewire:executor_failed_requests",
    "Requests that failed while the others of their step went on, by cause: nan (the model yields no numbers), "
    "illegal_token (outside the vocabulary), prompt, image, grammar, adapter",
    ["cause"],
)
FAILED_STEPS = Counter(
    "pagewire:executor_failed_steps",
    "Steps that failed without harm to the device: their requests are tried again, apart from each other",
)
_STEP_SECONDS = LoopHistogram("pagewire:executor_step_seconds", "Device time of a step", LATENCY_BUCKETS)
_QUEUE_SECONDS = LoopHistogram(
    "pagewire:executor_step_queue_seconds", "Time a step waited for the device", LATENCY_BUCKETS
)
_STEP_TOKENS = LoopHistogram(
    "pagewire:executor_step_tokens",
    "Tokens computed by a step",
    (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
)
_DRAFTS = Counter("pagewire:spec_decode_num_drafts", "Times that tokens were drafted for a request and checked")
_DRAFT_TOKENS = Counter("pagewire:spec_decode_num_draft_tokens", "Tokens that were drafted and checked")
_ACCEPTED_TOKENS = Counter("pagewire:spec_decode_num_accepted_tokens", "Drafted tokens that were right")
_ACCEPTED_PER_POSITION = Counter(
    "pagewire:spec_decode_num_accepted_tokens_per_pos",
    "Drafted tokens that were right, by place in their draft, from 0 on",
    ["position"],
)
RANKS = Gauge("pagewire:executor_ranks", "Processes that serve the model together, this one included")
RANK_WAIT_SECONDS = Gauge(
    "pagewire:executor_rank_wait_seconds", "How long this process has waited for the others in their steps, in all"
)
LIBRARY_SUMS = Counter(
    "pagewire:executor_library_sums",
    "Groups of ranks that share no memory of their GPUs, so that small sums, too, go through NCCL",
)
_REQUESTS = Gauge("pagewire:executor_rows_used", "Requests that hold a row")
WEIGHTS_VERSION = Gauge("pagewire:executor_weights_version", "1, of the weights in force", ["version"])
WEIGHTS_LOAD_SECONDS = Histogram(
    "pagewire:executor_weights_load_seconds",
    "Time to read weights that are to replace those in force, while steps go on",
    buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)
WEIGHTS_INSTALL_SECONDS = Histogram(
    "pagewire:executor_weights_install_seconds",
    "Time to put such weights in force, in which no step runs",
    buckets=LATENCY_BUCKETS,
)
WEIGHT_BYTES = Gauge("pagewire:executor_weight_bytes", "Bytes of the model's weights")
WEIGHTS = Gauge(
    "pagewire:executor_weights",
    "Weight matrices of the model (projections that are stacked count once), by the checkpoint's quantization method "
    "and the form they are multiplied in",
    ["method", "form"],
)
DEQUANTIZED_WEIGHTS = Gauge(
    "pagewire:executor_dequantized_weights",
    "Weight matrices that the checkpoint has quantized in a type no kernel multiplies with: slower, and larger",
)
KV_CACHE_BYTES = Gauge("pagewire:executor_kv_cache_bytes", "Bytes of the KV cache")
KV_CACHE_RESIDENT_BYTES = Gauge(
    "pagewire:executor_kv_cache_resident_bytes",
    "Bytes of the KV cache that take memory: on a CPU the pages in which a block has ever been used, else all",
)
LOAD_SECONDS = Gauge("pagewire:executor_load_seconds", "Time that starting took, by phase", ["phase"])
CPU_BACKEND = Gauge(
    "pagewire:executor_cpu_kernels", "1 for the CPU kernels in use: cpp, torch (slow), or triton (tests)", ["backend"]
)
ATTENTION_BACKEND = Gauge(
    "pagewire:executor_attention_backend",
    "1 for the implementation of attention in use: TRITON_ATTN (CUDA), CPU_ATTN (C++), or TORCH_SDPA (slow)",
    ["name"],
)


STAGE_BUSY_SECONDS = Counter(
    "pagewire:executor_stage_busy_seconds", "Time that each stage of a pipeline has computed", ["stage"]
)
STAGE_IDLE_SECONDS = Counter(
    "pagewire:executor_stage_idle_seconds",
    "Time that each stage of a pipeline has waited with a step at hand: for the stage before it, the first one for the "
    "last tokens",
    ["stage"],
)


stage_waits: defaultdict[int, float] = defaultdict(float)  # by stage, like STAGE_IDLE_SECONDS


def record_stages(times: StageTimes) -> None:
    """Records the times of a step of a pipeline."""
    for stage, (busy, waited) in enumerate(zip(times.busy, times.waited, strict=True)):
        STAGE_BUSY_SECONDS.labels(stage).inc(busy / 1e9)
        STAGE_IDLE_SECONDS.labels(stage).inc(waited / 1e9)
        stage_waits[stage] += waited / 1e9


def step_kind(step: Step) -> str:
    """Returns decode (one known token per request), prefill (more for each), mixed, or empty (only rows were freed)."""
    if not step.request_ids:
        return "empty"
    num_drafts = 0 if step.num_draft_tokens is None else step.num_draft_tokens
    is_single = step.num_scheduled_tokens - num_drafts == 1
    if is_single.all():
        return "decode"
    return "mixed" if is_single.any() else "prefill"


def record_step(kind: str, num_tokens: int, num_requests: int, execute_ns: int, queue_ns: int) -> None:
    _STEPS.labels(kind).inc()
    _STEP_SECONDS.observe(execute_ns / 1e9)
    _QUEUE_SECONDS.observe(queue_ns / 1e9)
    _STEP_TOKENS.observe(num_tokens)
    _REQUESTS.set(num_requests)


def record_drafts(tokens: HostTokens) -> None:
    """Records the numbers of drafted and of accepted tokens of a step."""
    if tokens.num_drafted is None:
        return
    accepted = (tokens.num_tokens - 1)[tokens.num_drafted > 0]
    _DRAFTS.inc(len(accepted))
    _DRAFT_TOKENS.inc(int(tokens.num_drafted.sum()))
    _ACCEPTED_TOKENS.inc(int(accepted.sum()))
    for position in range(int(accepted.max(initial=0))):
        _ACCEPTED_PER_POSITION.labels(position).inc(int((accepted > position).sum()))


def _attributes(request_id: int, code: str) -> dict[str, Any]:
    """code: a gRPC status code."""
    return {
        semconv.RPC_SYSTEM: "grpc",
        semconv.RPC_METHOD: "pagewire.v1.ExecutorService/Execute",
        semconv.RPC_STATUS: code,
        semconv.ERROR_TYPE: code if code in semconv.FAULTS_OF_SERVERS else None,
        "pagewire.request_id": request_id,
    }


class RequestSpans:
    """One span per traced request, from its first step on this executor to its end."""

    def __init__(self) -> None:
        self._open: dict[int, Span] = {}

    def update(self, step: Step) -> None:
        """Call once per step that was executed."""
        if self._open:
            for request_id in step.finished_request_ids:
                if (span := self._open.pop(request_id, None)) is not None:
                    span.end(_attributes(request_id, "OK"))
        for request in step.new_requests:
            if request.trace.traceparent and tracing():
                self._open[request.request_id] = Span("execute", request.trace, serves=True)

    def end_all(self, reason: str) -> None:
        """Ends all spans, when the stream has ended."""
        for request_id, span in self._open.items():
            span.end(_attributes(request_id, "UNAVAILABLE"), error=reason)
        self._open.clear()
