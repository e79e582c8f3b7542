"""The start of a model runner: load, size the KV cache, warm up, capture graphs. Runs on the device thread."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from pagewire.config import ExecutorConfig
from pagewire.config.values import executor as values
from pagewire.config.values import kv_cache as of_kv_cache
from pagewire.config.values import memory as of_memory
from pagewire.config.values.kv_transfer import of_vectors, role_of
from pagewire.config.values.offload import of_offload
from pagewire.errors import StartupError
from pagewire.kernels.ops import MAX_HEAD_DIM, cpu_backend
from pagewire.process.process import predecessor_failed, release_unused_memory, usable_cores
from pagewire.services.executor import stats
from pagewire.services.executor.adapters.loading import make_slots
from pagewire.services.executor.batch import kv_cache
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.device import memory
from pagewire.services.executor.device.progress import Progress
from pagewire.services.executor.graphs.capture_sizes import capture_sizes, prompt_sizes
from pagewire.services.executor.layers.kv_spec import KVSpec
from pagewire.services.executor.loading.served_model import ServedModel, load_served
from pagewire.services.executor.models.pooling import Pooling
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.parallel.group import ALONE_GROUP, Group
from pagewire.services.executor.runner.executor_info import NO_COSTS, DecodeCosts, ExecutorInfo
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.probe import BrokenModel, probe
from pagewire.services.executor.start.before import Before
from pagewire.services.executor.start.decode_costs import measure
from pagewire.services.executor.start.graph_capture import capture_graphs
from pagewire.services.executor.start.phases import Phases
from pagewire.services.executor.start.runner_setup import Setup, num_blocks
from pagewire.services.executor.start.warm_up import warm_up
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.step import InvalidStep

logger = logging.getLogger(__name__)

# vLLM's names of what computes attention with these kernels.
_ATTENTION_BACKENDS = {"triton": "TRITON_ATTN", "cpp": "CPU_ATTN", "torch": "TORCH_SDPA"}
_MIN_CUDA_MAJOR = 8  # major version of the compute capability
# The default limit if a prompt must be in one step: memory for activations grows with it.
_MAX_WHOLE_PROMPT = 8192


def resolve_device(name: str) -> torch.device:
    """Raises StartupError if CUDA is asked for and absent."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartupError("--device cuda: torch finds no CUDA device here; use --device cpu, or a CUDA build of torch")
    return torch.device("cuda", torch.cuda.current_device())


def _set_batch_invariance(config: ExecutorConfig, device: torch.device) -> None:
    """Chooses how the process computes from now on."""
    if device.type != "cpu" or cpu_backend() != "cpp":
        if config.batch_invariant:
            raise StartupError(values.of_batches_off_cpu())
        return
    from pagewire.kernels.cpu.products.packed_linear import set_batch_invariant

    set_batch_invariant(config.batch_invariant)


def start_runner(
    config: ExecutorConfig,
    model_path: str,
    progress: Progress,
    group: Group = ALONE_GROUP,
    before: Before | None = None,
) -> tuple[ModelRunner, ExecutorInfo]:
    """Loads the model and makes it ready. Call it on the thread that will execute steps.

    model_path: the directory of the files of `config.model`. group: the ranks that serve the model together; each of
    them calls this function. before: an earlier start in this process, for its sizes. Raises StartupError (also if
    memory does not suffice), ModelLoadError or RankLost.
    """
    config = replace(config, cpu_share=config.cpu_share / group.num_local)
    device, phases = resolve_device(config.device), Phases()
    _prepare(config, device)
    with phases("weights"):
        path = Path(model_path)
        served = before.served if before is not None else None
        if served is None:
            served = load_served(config, path, device, config.load_format, progress, group.tensor, group.stage)
        group.check_same("weights", served.digest)
    setup = _set_up(config, served, device, group)
    with phases("drafter"):
        setup = setup.with_drafter()  # before the free memory is measured
    if config.enable_lora:
        with phases("adapters"):
            # Behind the drafter: a copy of the model drafts without adapters.
            setup = replace(setup, adapters=make_slots(config, setup.model, device, group))
    if before is None:
        size = group.least(num_blocks(setup, path, phases, progress))
    else:
        size = before.info.cache_size
        memory.check_kv_cache_fits(setup.cache_bytes(size), device, "--kv-cache-memory-bytes, or free memory")
    progress(1.0, "KV cache")
    with phases("kv_cache"):
        longest = kv_cache.longest_request(kv_cache.kv_groups(setup.model, size, setup.limits), setup.limits)
        runner = setup.runner(size, replace(setup.limits, max_model_len=longest))
    _make_ready(setup, runner, model_path, phases, progress)
    costs = _measured(setup, runner, phases) if before is None else before.info.decode_costs
    logger.info("ready: %s", phases)
    group.check()
    info = replace(_describe(setup, runner), weights_digest=served.digest, decode_costs=costs, cache_size=size)
    if before is not None:
        info = replace(info, incarnation=before.info.incarnation)
    _report_bytes(info, runner, device)
    return runner, info


def _prepare(config: ExecutorConfig, device: torch.device) -> None:
    """Refuses settings that the device does not allow, and chooses how the process computes from now on."""
    if refused := of_offload(config, on_cuda=device.type == "cuda"):
        raise StartupError(refused)
    if device.type == "cuda":
        _check_cuda(config, device)
        kernels = "triton"
    else:
        kernels = _cpu_kernels()
        stats.CPU_BACKEND.labels(kernels).set(1)
    stats.ATTENTION_BACKEND.labels(_ATTENTION_BACKENDS[kernels]).set(1)
    _capture_sizes(config, device)
    _set_batch_invariance(config, device)
    # The number of OpenMP threads is a setting of the calling thread.
    torch.set_num_threads(config.num_threads or _num_threads(config))


def _capture_sizes(config: ExecutorConfig, device: torch.device) -> tuple[int, ...]:
    """Returns the numbers of requests of steps to capture. Raises StartupError for flags that contradict each other."""
    most = min(values.step_limits(config, on_cuda=device.type == "cuda"))
    return capture_sizes(config.cudagraph_capture_sizes, config.max_cudagraph_capture_size, most)


def _set_up(config: ExecutorConfig, served: ServedModel, device: torch.device, group: Group) -> Setup:
    """Returns what a runner is made of, without a drafter and without adapters. Refuses settings that do not suit the
    model."""
    model, pooling = served.model, served.pooling
    dtype = str(model.config.dtype).removeprefix("torch.")
    if config.batch_invariant and (refused := values.of_batches(dtype)):
        raise StartupError(refused)
    if not pooling.generates and (refused := of_vectors(role_of(config))):
        raise StartupError(refused)
    _check_model(model, device)
    limits = _limits(config, model, pooling, device)
    if refused := of_kv_cache.of_cache_dtype(config.kv_cache_dtype, dtype):
        raise StartupError(refused)
    uses_graphs = _uses_graphs(config, model, device)
    return Setup(
        config,
        model,
        limits,
        _capture_sizes(config, device) if uses_graphs and pooling.generates else (),
        device,
        _records_steps(config, model, device),
        pooling,
        group,
        # With splits of a fixed size, a graph would keep scratch memory for the longest context of every request.
        prompt_sizes(config.max_cudagraph_prompt_tokens, limits.max_num_batched_tokens)
        if uses_graphs and not config.attention_split_size
        else (),
    )


def _make_ready(setup: Setup, runner: ModelRunner, model_path: str, phases: Phases, progress: Progress) -> None:
    """Warms the runner up and captures graphs. Raises ModelLoadError for a model that yields no numbers."""
    progress(1.0, "warm-up")
    with phases("warm_up"):
        try:
            warm_up(runner, setup.device)
            probe(runner, setup.model.config.vocab_size)
        except (InvalidStep, BrokenModel) as error:
            raise ModelLoadError(f"{model_path}: {error}") from error
    if setup.device.type == "cpu":
        release_unused_memory()  # left over from loading and packing
    if setup.graph_sizes or setup.graph_prompts:
        with phases("graph_capture", [f"{len(setup.graph_sizes)} + {len(setup.graph_prompts)} sizes"]):
            capture_graphs(runner, setup.graph_sizes, progress, prompts=setup.graph_prompts)
            runner.dummy_run(1, 1)  # capturing emptied torch's caches: the first request need not wait for new memory


def _measured(setup: Setup, runner: ModelRunner, phases: Phases) -> DecodeCosts:
    """Returns the costs of steps by their tokens, if the runner drafts by them."""
    if setup.speculation is None or not setup.speculation.adaptive:
        return NO_COSTS
    with phases("decode_costs"):
        # Processor time, where other ranks need not be waited for: other processes start at the same time.
        is_alone = setup.device.type == "cpu" and setup.group.size == 1
        return measure(runner, setup.group, time.thread_time if is_alone else time.perf_counter)


def _num_threads(config: ExecutorConfig) -> int:
    """Returns all cores if they are bound to this process, otherwise its share of them."""
    return max(1, usable_cores() if config.cpu_bind is not None else int(usable_cores() * config.cpu_share))


def _check_cuda(config: ExecutorConfig, device: torch.device) -> None:
    """Refuses settings before weights are read that would otherwise fail in the first step."""
    if refused := values.of_cuda_blocks(values.block_size(config)):
        raise StartupError(refused)
    major, minor = torch.cuda.get_device_capability(device)
    if major < _MIN_CUDA_MAJOR:
        raise StartupError(
            f"--device cuda: {torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; the CUDA "
            f"kernels need {_MIN_CUDA_MAJOR}.0 (Ampere) or above; use --device cpu or another GPU"
        )


def _cpu_kernels() -> str:
    """Raises StartupError if the environment asks for kernels that do not exist."""
    try:
        return cpu_backend()
    except ValueError as error:
        raise StartupError(str(error)) from error


def _check_model(model: Model, device: torch.device) -> None:
    """Refuses models that no kernel computes, before the first step fails."""
    config = model.config
    for spec in kv_cache.groups(model):
        if isinstance(spec, KVSpec) and (spec.head_dim % 8 or spec.head_dim > MAX_HEAD_DIM):
            raise StartupError(
                f"{config.architecture}: attention takes heads of a multiple of 8 elements, up to {MAX_HEAD_DIM}; "
                f"this model's have {spec.head_dim}"
            )
    if device.type == "cpu" and cpu_backend() == "triton" and config.dtype == torch.bfloat16:
        raise StartupError(
            "PAGEWIRE_CPU_KERNELS=triton: the interpreter multiplies bfloat16 wrongly; add --dtype float32"
        )


def _limits(config: ExecutorConfig, model: Model, pooling: Pooling, device: torch.device) -> Limits:
    """Returns limits with which a step takes the longest prompt, if prompts are computed whole; by default up to
    _MAX_WHOLE_PROMPT tokens; longer prompts are refused."""
    max_num_seqs, max_tokens = values.step_limits(config, on_cuda=device.type == "cuda")
    max_len = config.max_model_len or min(
        model.config.max_position_embeddings, pooling.max_model_len or model.config.max_position_embeddings
    )
    if pooling.whole_prompts and config.max_num_batched_tokens is None:
        max_tokens = max(max_tokens, config.max_model_len or min(max_len, _MAX_WHOLE_PROMPT))
    if pooling.whole_prompts and max_len > max_tokens:
        logger.warning(
            "%s reads a prompt in one step of up to %d tokens, so longer prompts are refused (the model takes %d); "
            "raise --max-num-batched-tokens to serve them, which takes memory",
            model.config.architecture,
            max_tokens,
            max_len,
        )
        max_len = max_tokens
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    block_size = values.block_size(config, major + minor / 10)
    if refused := of_memory.of_blocks(block_size, config.state_block_size):
        raise StartupError(refused)
    if refused := of_memory.of_rows(max_num_seqs, max_tokens, max_len, memory.available_bytes(device)):
        raise memory.OutOfMemoryError(refused)
    return Limits(max_num_seqs, max_tokens, max_len, block_size, config.state_block_size)


def _uses_graphs(config: ExecutorConfig, model: Model, device: torch.device) -> bool:
    """Returns whether CUDA graphs are used; logs the reason if not."""
    if config.enforce_eager:
        reason = "--enforce-eager turns them off"
    elif device.type != "cuda":
        reason = f"steps run on {device}"
    elif not model.capturable:
        reason = f"{model.config.architecture} runs in transformers' code, which cannot be captured"
    else:
        return True
    if config.cudagraph_capture_sizes or config.max_cudagraph_capture_size or device.type == "cuda":
        logger.info("CUDA graphs are off: %s", reason)
    return False


def _records_steps(config: ExecutorConfig, model: Model, device: torch.device) -> bool:
    """Returns whether steps are recorded: the CPU's counterpart of CUDA graphs, which needs the C++ kernels. Whether a
    model's code can be recorded is found out when it is recorded."""
    return device.type == "cpu" and cpu_backend() == "cpp" and not config.enforce_eager


def _report_bytes(info: ExecutorInfo, runner: ModelRunner, device: torch.device) -> None:
    stats.WEIGHT_BYTES.set(info.weight_bytes)
    stats.KV_CACHE_BYTES.set(info.kv_cache_bytes)
    if device.type == "cpu":
        stats.KV_CACHE_RESIDENT_BYTES.set_function(partial(memory.resident_bytes, runner.kv_caches))
    else:
        stats.KV_CACHE_RESIDENT_BYTES.set(info.kv_cache_bytes)


def _describe(setup: Setup, runner: ModelRunner) -> ExecutorInfo:
    limits, model, device = runner.limits, setup.model, setup.device
    name = str(device) if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"
    if setup.group.size > 1:
        name = f"{setup.group.size} x {name}"
    return ExecutorInfo(
        incarnation=secrets.randbits(64),
        model=setup.config.model,
        max_model_len=limits.max_model_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.config.eos_token_ids,
        kv_groups=runner.kv_groups,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        device=name,
        dtype=str(model.config.dtype).removeprefix("torch."),
        weight_bytes=sum(setup.group.of_all(model.weight_bytes + setup.drafter_bytes)),
        kv_cache_bytes=sum(setup.group.of_all(sum(cache.nbytes for cache in runner.kv_caches))),
        max_draft_tokens=runner.max_draft_tokens,
        draft_bounds=() if setup.speculation is None else setup.speculation.draft_bounds,
        kind=setup.pooling.kind,
        labels=setup.pooling.labels,
        vector_size=setup.pooling.size or model.config.hidden_size,
        whole_prompts=setup.pooling.whole_prompts,
        predecessor_failed=predecessor_failed(),
        pipeline_stages=setup.group.stage.count,
        num_ranks=setup.group.size,
        role=role_of(setup.config),
    )
