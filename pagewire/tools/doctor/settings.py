"""Flags that contradict each other, or their purpose."""

from __future__ import annotations

from pagewire.config import ServeConfig
from pagewire.flags import refusals
from pagewire.process import local_executors
from pagewire.tools.doctor.finding import Finding, Findings, note, ok, problem, warning
from pagewire.tools.doctor.host import Host

_SPARE_MEMORY = 0.95


def check_settings(host: Host, config: ServeConfig) -> Findings:
    findings = list(_refused(host, config))
    findings += [finding for check in _CHECKS if (finding := check(config)) is not None]
    yield from findings or [ok("flags", "no contradictions")]
    if config.prefill_executors:
        names = zip(local_executors.names(config), local_executors.roles(config), strict=True)
        yield ok("roles", ", ".join(f"{name} {role}" for name, role in names))


def _refused(host: Host, config: ServeConfig) -> Findings:
    for error in refusals.refusals(config, tuple(sorted(host.usable_cpus())), host.nodes()):
        yield problem("flags", str(error), "`pagewire serve` ends with this before it starts anything", "as it says")


def _step(config: ServeConfig) -> Finding | None:
    tokens, rows = config.max_num_batched_tokens, config.max_num_seqs
    if tokens is None or rows is None or tokens >= rows:
        return None
    return warning(
        "flags",
        f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {rows}",
        "a step cannot give each running request a token: they take turns, and prompts wait for all of them",
        f"--max-num-batched-tokens {max(2 * rows, 2048)}, or --max-num-seqs {tokens}",
    )


def _whole_prompts(config: ServeConfig) -> Finding | None:
    if config.enable_chunked_prefill:
        return None
    return note(
        "flags",
        "--no-enable-chunked-prefill",
        "a prompt is computed in one step, and all others wait for it; one longer than a step's tokens is refused",
        "leave it out; --target-itl-ms limits how long others wait",
    )


def _prefix_cache(config: ServeConfig) -> Finding | None:
    if config.enable_prefix_caching:
        return None
    return note(
        "flags",
        "--no-enable-prefix-caching",
        "a system prompt is computed again for each request; finding it costs microseconds",
        "leave it out",
    )


def _eager(config: ServeConfig) -> Finding | None:
    if not config.enforce_eager:
        return None
    return warning(
        "flags",
        "--enforce-eager",
        "every step launches its kernels one by one: with few requests, most of the time is spent on launches",
        "leave it out; --max-cudagraph-capture-size and --max-cudagraph-prompt-tokens lower the memory of graphs",
    )


def _memory(config: ServeConfig) -> Finding | None:
    if config.kv_cache_memory_bytes is not None and config.num_gpu_blocks_override is not None:
        return note(
            "flags",
            "--num-gpu-blocks-override and --kv-cache-memory-bytes",
            "the number of blocks counts, the bytes do not",
            "leave one out",
        )
    if config.gpu_memory_utilization <= _SPARE_MEMORY or config.device == "cpu":
        return None
    return warning(
        "flags",
        f"--gpu-memory-utilization {config.gpu_memory_utilization:g}",
        "memory that other programs or the driver take later is then missing, and steps fail",
        f"--gpu-memory-utilization {_SPARE_MEMORY:g} or less",
    )


def _depth(config: ServeConfig) -> Finding | None:
    if config.pipeline_depth > 1:
        return None
    return note(
        "flags",
        "--pipeline-depth 1",
        "the executor waits for the scheduler between steps",
        "leave it out",
    )


def _tenants(config: ServeConfig) -> Finding | None:
    named = config.api_key_file is not None or config.tenant_header is not None
    if config.max_running_per_tenant is None or named:
        return None
    return warning(
        "flags",
        "--max-running-per-tenant without tenants",
        "all requests belong to one tenant: no more than this number run at once",
        "--api-key-file or --tenant-header names the tenant of a request",
    )


_CHECKS = (_step, _whole_prompts, _prefix_cache, _eager, _memory, _depth, _tenants)
