"""Finds faults in a configuration of the executor by this machine and the flags alone."""

from collections.abc import Iterator
from importlib.util import find_spec

from pagewire.config.executor import ExecutorConfig
from pagewire.config.profiles import has_nvidia_driver, runs_on_cuda
from pagewire.config.values import adapters, memory
from pagewire.config.values import executor as values
from pagewire.config.values.faults import parse_faults
from pagewire.config.values.kv_transfer import of_vectors, role_of


def refusals(config: ExecutorConfig) -> Iterator[str | None]:
    """Yields what follows from the flags and this machine, without the model's files. Raises StartupError, too."""
    is_here = config.distributed_executor_backend != "ray"  # otherwise, other machines compute
    on_cuda = runs_on_cuda(config.device)
    if config.device == "cuda" and is_here and not has_nvidia_driver():
        yield "--device cuda: this machine has no NVIDIA driver; use --device cpu, or install the driver"
    yield memory.of_blocks(values.block_size(config), config.state_block_size)
    if on_cuda and is_here:
        yield values.of_cuda_blocks(values.block_size(config))
    if is_here:
        most = min(values.step_limits(config, on_cuda=on_cuda))
        yield values.of_capture_sizes(config.cudagraph_capture_sizes, config.max_cudagraph_capture_size, most)
    if config.batch_invariant and on_cuda and is_here:
        yield values.of_batches_off_cpu()
    if config.runner == "generate":
        yield values.of_conversion(config.convert)
    if config.enable_expert_parallel:
        yield values.of_lone_experts(config.tensor_parallel_size)
    yield from adapters.refusals(config)
    role = role_of(config)
    yield memory.of_tiers(config, role)
    if config.runner == "pooling":
        yield of_vectors(role)
    if config.fault_injection is not None:
        parse_faults(config.fault_injection)
    if config.distributed_executor_backend == "ray" and find_spec("ray") is None:
        yield "--distributed-executor-backend ray: the package is not installed: pip install 'pagewire[ray]'"
    if config.model_impl == "transformers":
        yield values.of_division("the model", config.tensor_parallel_size, config.pipeline_parallel_size)
