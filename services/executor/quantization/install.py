"""Reads a model's quantized weights, packs them for the device and installs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
from torch import Tensor

from kernels.quantized import PackedWeight, QuantizedWeight, pack, stack, to_device
from services.executor.layers.weights import Dense, QuantizedModule, Shard
from services.executor.model_config import ModelLoadError
from services.executor.quantization.formats import TensorSpec
from services.executor.weights import WeightSource


def tensor_specs(shard: Shard) -> dict[str, TensorSpec]:
    """What a quantized shard is made of. Raises ModelLoadError naming the module if its shape cannot be stored so."""
    assert shard.format is not None
    try:
        specs = dict(shard.format.tensors(shard.out_features, shard.in_features))
    except ModelLoadError as error:
        raise ModelLoadError(f"module {shard.name}: {error}") from error
    if shard.has_bias:
        specs.pop("bias", None)
    return specs


def check_shard(weights: WeightSource, shard: Shard) -> list[str]:
    """Names of a quantized shard's tensors that are missing. Raises ModelLoadError for a wrong shape or type."""
    missing = []
    for suffix, spec in tensor_specs(shard).items():
        name = f"{shard.name}.{suffix}"
        if name not in weights.shapes:
            missing += [] if spec.optional else [name]
            continue
        if not spec.fits(weights.shapes[name]):
            expected = " or ".join(str(list(shape)) for shape in (spec.shape, *spec.also))
            raise ModelLoadError(f"tensor {name}: expected shape {expected}, found {list(weights.shapes[name])}")
        if weights.raw_dtype(name) not in spec.dtypes:
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
            raise ModelLoadError(f"tensor {name}: expected {expected}, found {weights.raw_dtype(name)}")
    return missing


def read_shard(weights: WeightSource, shard: Shard) -> QuantizedWeight:
    """Raises ModelLoadError naming the module for values that cannot be."""
    assert shard.format is not None
    names = {suffix: f"{shard.name}.{suffix}" for suffix in tensor_specs(shard)}
    tensors = {suffix: weights.raw(name) for suffix, name in names.items() if name in weights.shapes}
    try:
        return shard.format.read(tensors, shard.out_features, shard.in_features)
    except ModelLoadError as error:
        raise ModelLoadError(f"tensor {shard.name}.{error}") from error


def install(
    modules: Sequence[QuantizedModule],
    read: Callable[[Shard], QuantizedWeight | Tensor],
    device: torch.device,
    progress: Callable[[float, str], None],
    num_threads: int,
) -> None:
    """read: a shard's weight, on the host; a dense one in the model's dtype."""

    @torch.inference_mode()
    def load(module: QuantizedModule) -> None:
        module.install(_parts([read(shard) for shard in module.shards], device))

    with ThreadPoolExecutor(num_threads, thread_name_prefix="quantized") as pool:
        loads = {pool.submit(load, module): module for module in modules}
        try:
            for done, finished in enumerate(as_completed(loads), 1):
                finished.result()
                progress(done / len(loads), loads[finished].shards[0].name)
        finally:
            pool.shutdown(cancel_futures=True)


def _parts(weights: Sequence[QuantizedWeight | Tensor], device: torch.device) -> list[PackedWeight]:
    """Neighbours of one form become one weight."""
    parts: list[PackedWeight] = []
    run: list[QuantizedWeight] = []

    def end_run() -> None:
        if run:
            parts.append(pack(to_device(stack(run), device)))
            run.clear()

    for weight in weights:
        if isinstance(weight, Tensor):
            end_run()
            parts.append(Dense(weight.to(device)))
            continue
        if run and not run[-1].stacks_with(weight):
            end_run()
        run.append(weight)
    end_run()
    return parts
