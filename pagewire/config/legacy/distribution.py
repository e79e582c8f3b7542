"""Flags about several devices, processes and machines."""

from pagewire.config.legacy.entries import becomes, ignored, refused

_NODES = (
    "processes on several machines are started with --distributed-executor-backend ray, or one by one with external,"
    " --rank and --leader (docs/scale.md)"
)
_REPLICAS = (
    "replicas of one machine are --data-parallel-size; of several, each is an executor that the scheduler finds"
    " (--executor-discovery, docs/scale.md)"
)
_DISAGGREGATED = "an executor does both, prompts and decodes; keys and values are not sent elsewhere"
_EXPERTS = "experts are divided evenly among the devices: --enable-expert-parallel"
_COLLECTIVES = "devices talk by NCCL on CUDA and by shared memory on CPUs, with nothing to choose"

FLAGS = [
    becomes(
        "worker-use-ray",
        "distributed_executor_backend",
        values={"True": {"distributed_executor_backend": "ray"}, "False": {}},
        takes="switch",
    ),
    *ignored(
        "every service is a process of its own", "engine-use-ray", "disable-frontend-multiprocessing", takes="switch"
    ),
    *ignored("all processes of a group load at once", "max-parallel-loading-workers"),
    *ignored("profile a process of Ray's with its own tools", "ray-workers-use-nsight", takes="switch"),
    *ignored(
        _COLLECTIVES,
        "disable-custom-all-reduce",
        "disable-nccl-for-dp-synchronization",
        "enable-batch-sharded-sampling",
        takes="switch",
    ),
    *ignored(_COLLECTIVES, "distributed-timeout-seconds", "cpu-distributed-timeout-seconds", "dp-sync-interval"),
    *refused("code from outside is not loaded", "worker-cls", "worker-extension-cls", harmless=("auto", "")),
    *refused(_NODES, "nnodes", harmless=("1",), short=("-n",)),
    *refused(_NODES, "node-rank", harmless=("0",), short=("-r",)),
    *ignored(_NODES, "master-addr", "master-port"),
    *refused(_NODES, "headless", takes="switch"),
    *refused("set CUDA_VISIBLE_DEVICES for the process", "device-ids"),
    *refused(_REPLICAS, "data-parallel-rank", harmless=("0",), short=("-dpn",)),
    *refused(_REPLICAS, "data-parallel-start-rank", harmless=("0",), short=("-dpr",)),
    *refused(_REPLICAS, "data-parallel-size-local", short=("-dpl",)),
    *ignored(_REPLICAS, "data-parallel-address", short=("-dpa",)),
    *ignored(_REPLICAS, "data-parallel-rpc-port", short=("-dpp",)),
    *ignored(_REPLICAS, "data-parallel-backend", short=("-dpb",)),
    *ignored(_REPLICAS, "data-parallel-hybrid-lb", takes="switch", short=("-dph",)),
    *ignored(_REPLICAS, "data-parallel-external-lb", takes="switch", short=("-dpe",)),
    *ignored(_REPLICAS, "data-parallel-multi-port-external-lb", takes="switch", short=("-dpm",)),
    *ignored(
        _REPLICAS,
        "data-parallel-supervisor-port",
        "dp-supervisor-probe-interval-s",
        "dp-supervisor-probe-timeout-s",
        "dp-supervisor-probe-failure-threshold",
    ),
    *ignored(
        _EXPERTS, "enable-eplb", "enable-elastic-ep", "enable-ep-weight-filter", "eplb-log-balancedness", takes="switch"
    ),
    *ignored(
        _EXPERTS,
        "eplb-config",
        "num-redundant-experts",
        "eplb-window-size",
        "eplb-step-interval",
        "expert-placement-strategy",
        "all2all-backend",
    ),
    *ignored(
        "steps of a pipeline's stages run at the same time: --pipeline-parallel-size", "enable-dbo", takes="switch"
    ),
    *ignored(
        "steps of a pipeline's stages run at the same time: --pipeline-parallel-size",
        "dbo-decode-token-threshold",
        "dbo-prefill-token-threshold",
        "ubatch-size",
    ),
    *ignored(
        "a request's keys and values are divided by heads, not by tokens: --tensor-parallel-size",
        "dcp-comm-backend",
        "dcp-kv-cache-interleave-size",
        "cp-kv-cache-interleave-size",
    ),
    *ignored(
        "a request's keys and values are divided by heads, not by tokens: --tensor-parallel-size",
        "dcp-q-replicate",
        takes="switch",
    ),
    *ignored(
        "a request's keys and values are divided by heads, not by tokens: --tensor-parallel-size",
        "decode-context-parallel-size",
        short=("-dcp",),
    ),
    *ignored(
        "a request's keys and values are divided by heads, not by tokens: --tensor-parallel-size",
        "prefill-context-parallel-size",
        short=("-pcp",),
    ),
    *ignored("images are encoded where the first layers are", "mm-encoder-tp-mode"),
    *ignored(
        "images are encoded where the first layers are", "enable-multimodal-encoder-data-parallel", takes="switch"
    ),
    *refused(_DISAGGREGATED, "kv-transfer-config", "ec-transfer-config", "ec-manager-config"),
    *ignored("blocks are not announced to others", "kv-events-config"),
    *refused("weights are replaced from a directory: POST /update_weights_from_disk", "weight-transfer-config"),
    *ignored(
        "requests survive the death of a process, without a flag (docs/reliability.md)",
        "enable-fault-tolerance",
        takes="switch",
    ),
    *ignored("requests survive the death of a process, without a flag (docs/reliability.md)", "fault-tolerance-config"),
]
