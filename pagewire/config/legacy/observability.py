"""Flags about logs, metrics and traces."""

from pagewire.config.legacy.entries import ignored

_NOT_LOGGED = "a request is one line of the log, without its prompt and output; --log-level warning leaves it out"
_ALL = "/metrics has what there is, without a flag"
_ACCESS = "a request is one line of the log; --log-level warning leaves it out"

FLAGS = [
    *ignored(
        _NOT_LOGGED,
        "disable-log-requests",
        "enable-log-requests",
        "enable-log-outputs",
        "enable-log-deltas",
        takes="switch",
    ),
    *ignored(_NOT_LOGGED, "max-log-len"),
    *ignored(
        "one line in ten seconds says what runs; --log-level warning leaves it out", "disable-log-stats", takes="switch"
    ),
    *ignored("one line in ten seconds says what runs", "aggregate-engine-logging", takes="switch"),
    *ignored(_ACCESS, "uvicorn-log-level", "disable-access-log-for-endpoints"),
    *ignored(_ACCESS, "disable-uvicorn-access-log", takes="switch"),
    *ignored("what is logged is --log-level and --log-format", "log-config-file"),
    *ignored("what is logged is --log-level and --log-format", "log-error-stack", takes="switch"),
    *ignored(_ALL, "show-hidden-metrics-for-version", "kv-cache-metrics-sample", "custom-histogram-buckets"),
    *ignored(
        _ALL,
        "kv-cache-metrics",
        "cudagraph-metrics",
        "enable-mfu-metrics",
        "per-request-spec-decode-metrics",
        "enable-logging-iteration-details",
        takes="switch",
    ),
    *ignored("every request's trace has its stages: --otlp-traces-endpoint", "collect-detailed-traces", takes="words"),
    *ignored("profile with your own tools", "profiler-config", "jit-monitor-mode"),
    *ignored("profile with your own tools", "enable-layerwise-nvtx-tracing", "jit-monitor-verbose", takes="switch"),
]
