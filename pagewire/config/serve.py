"""Flags of `pagewire serve`: the flags of all services, and those of the stack."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from pagewire.config.executor import ExecutorConfig
from pagewire.config.fields import PORT, POSITIVE, Range, flag
from pagewire.config.gateway import GatewayConfig
from pagewire.config.ray import RayConfig
from pagewire.config.scheduler import SchedulerConfig
from pagewire.config.shared import ServiceConfig
from pagewire.config.tokenizer import TokenizerConfig


@dataclass(frozen=True, kw_only=True)
class ServeConfig(GatewayConfig, TokenizerConfig, SchedulerConfig, RayConfig, ExecutorConfig):
    """The whole local stack: the flags of all services, and those of the stack."""

    grpc_port: int = flag(
        8001,
        "public gRPC port of the tokenizer, for text; if it is not set and in use, the next free port",
        group="network",
        valid=PORT,
    )
    scheduler_grpc_port: int | None = flag(
        None,
        "public gRPC port of the scheduler, for token ids (default: not served)",
        group="network",
        valid=PORT,
    )
    prefill_executors: int = flag(
        0,
        "of the executors of --data-parallel-size, how many only compute prompts, while the others decode; 0: all do "
        "both",
        group="executor",
        valid=Range(minimum=0, maximum=1023),
    )
    uds_dir: str | None = flag(
        None,
        "directory for the Unix sockets between the services, which becomes private (default: a new directory)",
        group="network",
    )

    other_models: str | None = flag(
        None, "models beside MODEL, as those that follow it on the command line", group="models", takes="words"
    )
    models: str | None = flag(
        None, "YAML file of models, each with names and flags of its own (docs/operations.md)", group="models"
    )
    model_alias: str | None = flag(
        None, "further names of models: NAME=MODEL ..., with MODEL as it is served", group="models", takes="words"
    )
    default_model: str | None = flag(
        None, "model, as it is served, that serves unknown names (default: they are refused)", group="models"
    )
    models_memory: int | None = flag(
        None,
        "memory of all models, on CUDA that of the device: idle ones make room for one that is requested; suffixes as "
        "in 12GiB (default: 0.9 of the memory)",
        group="models",
        kind="size",
        valid=POSITIVE,
    )
    max_loaded_models: int | None = flag(
        None, "maximum number of models that are awake at once (default: no limit)", group="models", valid=POSITIVE
    )

    def part(self, service: type[ServiceConfig], **overrides: Any) -> Any:
        """Returns the configuration of one service: the values of this one, then the overrides."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(service) if f.name not in overrides}
        return service(**(values | overrides))


# The stack sets these fields of its services: they are not flags of `pagewire serve`.
_SET_BY_STACK = """
listen public_listen public_admin reuse_port tokenizer_discovery scheduler_discovery executor_discovery
tokenizer_address scheduler_address executor_address lines_address cpu_share memory_share role rank leader group_secret
"""
SET_BY_STACK = tuple(_SET_BY_STACK.split())
