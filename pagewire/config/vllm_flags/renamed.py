"""Flags of vLLM that have another name here, or become several flags."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from pagewire.config.vllm_flags.entries import BECOMES, VllmFlag
from pagewire.config.vllm_flags.values import REWARD


def _becomes(
    name: str,
    to: str,
    why: str = "",
    *,
    values: Mapping[str, Mapping[str, str]] | None = None,
    convert: Callable[[str], str] | None = None,
    refused: Mapping[str, str] | None = None,
    takes: str = "value",
    short: tuple[str, ...] = (),
) -> VllmFlag:
    return VllmFlag(name, BECOMES, why, to, values or {}, convert, refused=refused or {}, takes=takes, short=short)


def _rope(text: str) -> str:
    """Converts the value of --rope-scaling to one of --hf-overrides. Raises ValueError."""
    scaling: Any = json.loads(text)
    if not isinstance(scaling, dict):
        raise ValueError("expected a JSON object")
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    return json.dumps({"rope_parameters": scaling})


_POOLING = {"runner": "pooling"}

FLAGS = [
    _becomes(
        "task",
        "runner",
        values={
            "auto": {"runner": "auto"},
            "generate": {"runner": "generate"},
            "embed": {**_POOLING, "convert": "embed"},
            "embedding": {**_POOLING, "convert": "embed"},
            "classify": {**_POOLING, "convert": "classify"},
            "score": _POOLING,
        },
        refused={"reward": REWARD},
    ),
    _becomes("rope-scaling", "hf_overrides", "it changes config.json, as --hf-overrides does", convert=_rope),
    _becomes(
        "language-model-only",
        "limit_mm_per_prompt",
        values={"True": {"limit_mm_per_prompt": "image=0"}, "False": {}},
        takes="switch",
    ),
    _becomes(
        "guided-decoding-disable-any-whitespace",
        "structured_outputs_config",
        values={"True": {"structured_outputs_config": '{"disable_any_whitespace": true}'}, "False": {}},
        takes="switch",
    ),
    _becomes("device-memory-utilization", "gpu_memory_utilization"),
    _becomes("kv-cache-memory", "kv_cache_memory_bytes"),
    _becomes("mamba-block-size", "state_block_size"),
    _becomes("cuda-graph-sizes", "cudagraph_capture_sizes", takes="words"),
    _becomes(
        "async-scheduling",
        "pipeline_depth",
        values={"True": {"pipeline_depth": "2"}, "False": {"pipeline_depth": "1"}},
        takes="switch",
    ),
    _becomes("max-num-queued-reqs", "max_waiting_requests", "it counts waiting requests, not running ones"),
    _becomes(
        "performance-mode",
        "profile",
        values={
            "balanced": {},
            "interactivity": {"profile": "latency"},
            "throughput": {"profile": "throughput"},
        },
    ),
    _becomes(
        "worker-use-ray",
        "distributed_executor_backend",
        values={"True": {"distributed_executor_backend": "ray"}, "False": {}},
        takes="switch",
    ),
    _becomes("speculative-mode", "speculative_model"),
    _becomes("speculative-draft-tp", "speculative_draft_tensor_parallel_size", short=("-spec-draft-tp",)),
    _becomes("renderer-num-workers", "tokenizer_pool_size"),
]
