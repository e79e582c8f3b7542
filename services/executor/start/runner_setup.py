"""A loaded model before it has a runner: the parts of the runner, and the number of blocks of its cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from pagewire.config import ExecutorConfig
from pagewire.config.speculation import LOOKUP_METHODS, Speculation
from pagewire.config.values.drafts import DEFAULT_BITS
from pagewire.config.values.faults import parse_faults
from pagewire.services.executor.batch import kv_cache
from pagewire.services.executor.device import memory
from pagewire.services.executor.device.memory import mib
from pagewire.services.executor.device.progress import Progress
from pagewire.services.executor.graphs.cuda_graphs import CudaGraphs, Steps
from pagewire.services.executor.loading.weights.identity import model_key
from pagewire.services.executor.models.pooling import LAST_STATE, Pooling
from pagewire.services.executor.models.protocol import Model, OwnModel
from pagewire.services.executor.models.vision.vision_model import VisionModel
from pagewire.services.executor.parallel.group import ALONE_GROUP, Group
from pagewire.services.executor.parallel.tokens import tokens_of
from pagewire.services.executor.runner.adapters import NO_ADAPTERS, Adapters
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.pipeline.pipeline_stage import stage_in
from pagewire.services.executor.runner.stage import StageExchange
from pagewire.services.executor.sampling.logprobs import LogprobsMode
from pagewire.services.executor.sampling.tokens import Tokens
from pagewire.services.executor.speculation import draft_cache
from pagewire.services.executor.speculation.build import make_proposer, why_not
from pagewire.services.executor.speculation.draft_steps import Target
from pagewire.services.executor.speculation.drafters import check_drafters, load_drafter, own_bytes
from pagewire.services.executor.speculation.quantized_copy import saved_bytes
from pagewire.services.executor.start import memory_profile
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.start.fault_injection import FaultyRunner
from pagewire.services.executor.start.kv_cache_size import MemoryProfile, kv_cache_bytes
from pagewire.services.executor.start.memory_profile import CudaMeter, Meter, cached_or_measured
from pagewire.services.executor.start.phases import Phases
from pagewire.services.executor.step.limits import Limits

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """A loaded model, and all parts of its runner except the number of blocks."""

    config: ExecutorConfig
    model: Model
    limits: Limits
    graph_sizes: tuple[int, ...]  # rising; empty = no CUDA graphs
    device: torch.device
    record_steps: bool = False  # on a CPU
    pooling: Pooling = LAST_STATE
    group: Group = ALONE_GROUP
    graph_prompts: tuple[int, ...] = ()  # tokens of steps with prompts, like graph_sizes
    adapters: Adapters = NO_ADAPTERS
    drafter: Model | None = None  # the model that drafts, if one does

    @cached_property
    def speculation(self) -> Speculation | None:
        """The method that drafts tokens, if one does."""
        speculation = Speculation.of(self.config)
        if speculation is None or not speculation.if_possible:
            return speculation
        return None if why_not(self.model, self.pooling, self.group, self.device) else speculation

    def with_drafter(self) -> Setup:
        """Returns the setup with the model that drafts, if one does. Raises StartupError (also if ranks have different
        weights), ModelLoadError or RankLost."""
        if (speculation := self.speculation) is None:
            if reason := why_not(self.model, self.pooling, self.group, self.device):
                logger.info("no tokens are drafted: %s", reason)
            return self
        if speculation.if_possible:
            most = speculation.num_speculative_tokens
            logger.info("n-grams draft up to %d tokens at once; --spec-method none turns them off", most)
        drafter = load_drafter(speculation, self.config, self.model, self.limits, self.device, self.group)
        if drafter is not None:
            check_drafters(speculation, self.config, self.group)
        return replace(self, drafter=drafter)

    @property
    def drafter_bytes(self) -> int:
        """Bytes of the drafting model's weights that it does not share with the target."""
        return 0 if self.drafter is None else own_bytes(self.drafter, self.model) + self.later_bytes

    @property
    def later_bytes(self) -> int:
        """Bytes that a copy of the model will take once it is made."""
        if self.drafter is None or self.speculation is None or not self.speculation.if_possible:
            return 0
        assert isinstance(self.model, OwnModel)
        return saved_bytes(self.model, DEFAULT_BITS)[0]

    def cache_bytes(self, num_blocks: int) -> int:
        """Returns the bytes of the KV cache, including that of a drafting model."""
        of_model = kv_cache.cache_bytes(self.model, num_blocks, self.limits)
        if self.drafter is None or self.speculation is None or self.speculation.method in (*LOOKUP_METHODS, "self"):
            return of_model
        return of_model + draft_cache.num_bytes(self.drafter, self.model, num_blocks, self.limits)

    def _drafted_for(self, num_blocks: int, limits: Limits, tokens: Tokens) -> Target:
        def steps() -> Steps:
            return self._recorded_steps(limits, drafts=True) if self.record_steps else CudaGraphs()

        return Target(self.model, limits, num_blocks, self.device, self.config.attention_split_size, steps, tokens)

    @cached_property
    def stage(self) -> StageExchange:
        """The exchange of every runner with other stages."""
        most = 0 if self.speculation is None else self.speculation.num_speculative_tokens
        return stage_in(self.group, self.model, self.limits, self.device, most)

    def runner(self, num_blocks: int, limits: Limits) -> ModelRunner:
        make: Callable[..., ModelRunner] = ModelRunner
        if self.config.fault_injection:
            make = partial(FaultyRunner, parse_faults(self.config.fault_injection))
        tokens = tokens_of(self.group, max(limits.max_num_seqs, limits.max_num_batched_tokens), self.device)
        drafted_for = self._drafted_for(num_blocks, limits, tokens)
        proposer = make_proposer(self.speculation, self.pooling, self.group, drafted_for, self.drafter)
        max_draft_tokens = 0 if proposer is None else proposer.max_draft_tokens
        return assemble(
            self.model,
            limits,
            num_blocks,
            self.device,
            attention_split_size=self.config.attention_split_size,
            graphs=self._recorded_steps(limits, max_draft_tokens) if self.record_steps else None,
            pooling=self.pooling,
            image_cache_bytes=self.config.mm_encoder_cache_bytes,
            logprobs_mode=LogprobsMode(self.config.logprobs_mode),
            tokens=tokens,
            stage=self.stage,
            proposer=proposer,
            adapters=self.adapters,
            make=make,
        )

    def _recorded_steps(self, limits: Limits, max_draft_tokens: int = 0, *, drafts: bool = False) -> Steps:
        """drafts: whether they are of a model that drafts."""
        # Compiles the C++ kernels, which a GPU does not need.
        from pagewire.services.executor.graphs.recorded_steps import REQUESTS, RecordedSteps

        return RecordedSteps(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            requests=REQUESTS if self.pooling.generates else (),
            max_draft_tokens=max_draft_tokens,
            with_adapters=self.adapters.num_slots > 0 and not drafts,
        )


def num_blocks(setup: Setup, model_path: Path, phases: Phases, progress: Progress) -> int:
    """Returns the blocks of a group of layers that sees all tokens; those of other groups follow from it."""
    config, limits, device = setup.config, setup.limits, setup.device
    if config.num_gpu_blocks_override is not None:
        num_bytes = setup.cache_bytes(config.num_gpu_blocks_override)
        memory.check_kv_cache_fits(num_bytes, device, "--num-gpu-blocks-override")
        return config.num_gpu_blocks_override
    if not setup.model.caching_layers:
        return 0
    flag = "--kv-cache-memory-bytes"
    if config.kv_cache_memory_bytes is not None:
        num_bytes = config.kv_cache_memory_bytes
        memory.check_kv_cache_fits(num_bytes, device, flag)
    elif device.type == "cpu":
        usable_blocks = -(-limits.max_num_seqs * limits.max_model_len // limits.block_size)
        usable_bytes = setup.cache_bytes(usable_blocks)
        available = memory.available_cpu_bytes() - setup.later_bytes
        num_bytes = kv_cache.default_cpu_bytes(available, usable_bytes, config.cpu_share * config.memory_share)
    else:
        flag = "--gpu-memory-utilization"
        num_bytes = cuda_cache_bytes(setup, model_path, CudaMeter(device), phases, progress)
    return kv_cache.blocks_within(num_bytes, setup.model, limits, flag, setup.cache_bytes)


def cuda_cache_bytes(setup: Setup, model_path: Path, meter: Meter, phases: Phases, progress: Progress) -> int:
    """Returns the memory for the KV cache within `--gpu-memory-utilization`, by a profile that is measured once."""
    meter.release()
    before, utilization = meter.now(), setup.config.gpu_memory_utilization

    def measure() -> MemoryProfile:
        profile = memory_profile.measure(
            setup.runner(1, setup.limits), setup.graph_sizes, meter, prompts=setup.graph_prompts
        )
        meter.release()
        return profile

    progress(1.0, "memory profile")
    notes: list[str] = []
    with phases("memory_profile", notes):
        key = _profile_key(setup, model_path) | meter.key()
        profile, was_known = cached_or_measured(key, measure, all_have=setup.group.all_have)
        notes += ["cached"] * was_known
    kept_images = setup.config.mm_encoder_cache_bytes if isinstance(setup.model, VisionModel) else 0
    num_bytes = kv_cache_bytes(before, utilization, profile) - kept_images
    logger.info(
        "KV cache %s = %s x %g - %s outside of torch - %s libraries - %s weights and activations - %s CUDA graphs - %s "
        "images (--mm-encoder-cache-bytes)",
        *map(mib, (num_bytes, before.total)),
        utilization,
        *map(mib, (before.outside_torch, profile.library_bytes, profile.peak_bytes, profile.graph_bytes, kept_images)),
    )
    return num_bytes


def _profile_key(setup: Setup, model_path: Path) -> dict[str, Any]:
    """Returns what a memory profile depends on, apart from device and software."""
    config = setup.config
    return {
        "model": model_key(model_path),
        "load_format": config.load_format,
        "model_impl": config.model_impl,
        "quantization": config.quantization,
        "hf_overrides": config.hf_overrides,
        "dtype": setup.model.config.dtype,
        "kv_cache": [(asdict(spec), len(layers)) for spec, layers in kv_cache.groups(setup.model).items()],
        "attention_split_size": config.attention_split_size,
        "limits": asdict(setup.limits),
        "cpu_offload_gb": config.cpu_offload_gb,
        "graph_sizes": setup.graph_sizes,
        "graph_prompts": setup.graph_prompts,
        "logprobs_mode": config.logprobs_mode,
        "speculation": setup.speculation and asdict(setup.speculation),
        "adapters": (setup.adapters.num_slots, setup.adapters.nbytes),
        "kind": setup.pooling.kind,  # whether the largest steps have logits
        "rank": (setup.group.rank, setup.group.size, setup.group.stage.count),  # its layers and its role
    }
