"""Flags about which requests run when."""

from pagewire.config.legacy.entries import becomes, ignored, refused

_EVERY_STEP = (
    "each step takes decodes first and fills the rest with prompts, so nothing is delayed; what prompts may cost"
    " decodes is --target-itl-ms"
)
_NO_MULTI_STEP = "the next step is prepared while one runs: --pipeline-depth"

FLAGS = [
    *ignored(_EVERY_STEP, "scheduler-delay-factor", "prefill-schedule-interval"),
    *ignored(_NO_MULTI_STEP, "num-scheduler-steps"),
    *ignored(_NO_MULTI_STEP, "multi-step-stream-outputs", "disable-async-output-proc", takes="switch"),
    becomes(
        "async-scheduling",
        "pipeline_depth",
        values={"True": {"pipeline_depth": "2"}, "False": {"pipeline_depth": "1"}},
        takes="switch",
    ),
    *ignored("blocks are taken as tokens come, drafted ones included", "num-lookahead-slots"),
    becomes("max-num-queued-reqs", "max_waiting_requests", "it counts those that wait, not those that run"),
    *ignored("what may wait is bounded by time: --max-queue-time", "max-num-queued-tokens"),
    *ignored("what runs at once is bounded by --max-num-seqs", "max-num-active-seqs"),
    *ignored("what a step computes is bounded by --max-num-batched-tokens", "max-num-scheduled-tokens"),
    *ignored("a request begins when there are blocks for what it computes next", "watermark"),
    *ignored(
        "a request begins when there are blocks for what it computes next",
        "scheduler-reserve-full-isl",
        "disable-chunked-mm-input",
        takes="switch",
    ),
    *ignored("what is long is --long-prefill-token-threshold", "long-prefill-token-threshold-adaptive", takes="switch"),
    *refused("code from outside is not loaded; policies are --scheduling-policy", "scheduler-cls"),
    becomes(
        "performance-mode",
        "profile",
        values={
            "balanced": {},
            "interactivity": {"profile": "latency"},
            "throughput": {"profile": "throughput"},
        },
    ),
    *ignored("every token is sent as soon as there is one", "stream-interval"),
]
