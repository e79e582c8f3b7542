"""Makes a ready model from a directory or a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kernels.quantized import QuantizedWeight
from pagewire.process import usable_cores
from services.executor import memory
from services.executor.attention import AttentionMetadata, PagedAttention
from services.executor.checkpoint import DirectoryCheckpoint, GgufCheckpoint, open_checkpoint
from services.executor.layers.weights import Shard
from services.executor.model_config import ModelConfig, ModelLoadError
from services.executor.models import ARCHITECTURES
from services.executor.models.decoder import DecoderModel
from services.executor.quantization.install import check_shard, install, read_shard, tensor_specs
from services.executor.quantization.methods import check_requested
from services.executor.weights import WeightSource
from services.executor.weights.dummy import fill_random
from services.executor.weights.kv_scales import is_attention_scale, read_kv_scales
from services.executor.weights.staging import Staging, cuda_staging

logger = logging.getLogger(__name__)

Progress = Callable[[float, str], None]

_STAGING_BYTES = 8 << 20  # of one buffer: long enough a copy to use the whole bus
_MAX_THREADS = {"cpu": 4, "cuda": 8}  # that read weights; a device waits for pages to be mapped, so more help there

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Model(Protocol):
    """What the model runner drives: our own models and transformers' look the same to it."""

    config: ModelConfig
    capturable: bool  # whether CUDA graphs may replay it

    @property
    def attention_layers(self) -> list[PagedAttention]:
        """Those that need a KV cache, in layer order."""

    @property
    def weight_bytes(self) -> int: ...

    def bind_kv_cache(self, kv_caches: list[Tensor]) -> None:
        """One [num_blocks, 2, num_kv_heads, block_size, head_dim] per attention layer, in layer order."""

    def forward(self, input_ids: Tensor, positions: Tensor, attn: AttentionMetadata) -> Tensor:
        """input_ids, positions int64 [num_tokens] -> hidden states [num_tokens, hidden_size]"""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden_size] -> [S, vocab_size]"""


def load_model(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: torch.device,
    load_format: str = "auto",
    model_impl: str = "auto",
    max_model_len: int | None = None,
    kv_scales: bool = False,
    quantization: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Model:
    """Loads weights into a model on `device`.

    model: directory with `config.json`, or a `.gguf` file. load_format: auto, safetensors, gguf, or dummy (random
    weights by `seed`). model_impl: auto takes our own implementation where there is one, else transformers'.
    dtype auto: the checkpoint's, if that has 16 bits, else bfloat16. max_model_len: longest request to serve, by
    default `max_position_embeddings`. kv_scales: give every attention layer the scales of an fp8 KV cache, the
    checkpoint's if it has them, else 1. progress is called with the fraction done and what was read.

    Raises ModelLoadError with the cause and the remedy.
    """
    progress = progress or _no_progress
    checkpoint = open_checkpoint(Path(model), load_format)
    torch_dtype = resolve_dtype(dtype, checkpoint.dtype)
    own = checkpoint.architecture in ARCHITECTURES
    if model_impl == "pagewire" and not own:
        raise ModelLoadError(
            f"{checkpoint.path}: architecture {checkpoint.architecture} is not one of {', '.join(ARCHITECTURES)}; "
            "use --model-impl transformers"
        )
    if model_impl == "transformers" or not own:
        # Imported here: transformers costs seconds that our own models do without.
        from services.executor.models.transformers_model import load_transformers_model

        dummy_seed = seed if load_format == "dummy" else None
        loaded: Model = load_transformers_model(checkpoint, torch_dtype, device, max_model_len, dummy_seed)
        progress(1.0, checkpoint.path.name)
    else:
        loaded = _load_own(checkpoint, torch_dtype, device, load_format, max_model_len, seed, quantization, progress)
    if kv_scales:
        weights = None if load_format == "dummy" else checkpoint.weights(loaded.config)
        _set_kv_scales(loaded, weights, checkpoint.path, device)
    return loaded


def _load_own(
    checkpoint: DirectoryCheckpoint | GgufCheckpoint,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    max_model_len: int | None,
    seed: int,
    quantization: str | None,
    progress: Progress,
) -> DecoderModel:
    config = checkpoint.config(dtype)
    length = served_len(checkpoint.path, config, max_model_len)
    weights = None if load_format == "dummy" else checkpoint.weights(config)
    found = checkpoint.quantization(weights)
    check_requested(quantization, found)
    # Without memory of its own: what does not fit the checkpoint or the device is refused before any is taken.
    shapes = DecoderModel(config, length, torch.device("meta"), found)
    stored = 0
    if weights is not None:
        stored = check_tensors(checkpoint.path, weights, shapes)
    memory.check_weights_fit(shapes.weight_bytes + stored, device)
    model = DecoderModel(config, length, device, found)
    num_threads = min(_MAX_THREADS[device.type], usable_cores())
    if weights is not None:
        read_tensors(weights, model.load_targets(), progress, num_threads, _staging(model, device, num_threads))
    else:
        fill_random(model.load_targets(), seed)
        progress(1.0, "random weights")
    if modules := model.quantized_modules():
        read = partial(_read_shard, weights, config.dtype, torch.Generator().manual_seed(seed))
        install(modules, read, device, progress, num_threads)
    return model


def _read_shard(
    weights: WeightSource | None, dtype: torch.dtype, generator: torch.Generator, shard: Shard
) -> QuantizedWeight | Tensor:
    if shard.format is None:
        tensor = torch.empty(shard.out_features, shard.in_features, dtype=dtype)
        if weights is None:
            return tensor.normal_(0.0, 0.02, generator=generator)
        weights.read_into(f"{shard.name}.weight", tensor)
        return tensor
    if weights is None:
        return shard.format.random(shard.out_features, shard.in_features, generator)
    return read_shard(weights, shard)


def resolve_dtype(name: str, checkpoint_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype to compute in; see `load_model` for auto."""
    if name == "auto":
        is_half = checkpoint_dtype in (torch.bfloat16, torch.float16)
        return checkpoint_dtype if checkpoint_dtype is not None and is_half else torch.bfloat16
    if name not in _DTYPES:
        raise ModelLoadError(f"--dtype {name!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def served_len(path: Path, config: ModelConfig, max_model_len: int | None) -> int:
    """`max_model_len`, checked against what the model's positions reach."""
    if max_model_len is None:
        return config.max_position_embeddings
    if max_model_len > config.max_supported_len:
        raise ModelLoadError(
            f"{path}: --max-model-len {max_model_len} exceeds the model's {config.max_supported_len} positions; "
            "lower it"
        )
    return max_model_len


def check_tensors(path: Path, weights: WeightSource, model: DecoderModel) -> int:
    """Bytes of quantized tensors. Raises ModelLoadError naming tensors missing, unexpected or of a wrong shape."""
    targets = dict(model.load_targets())
    missing = [name for name in targets if name not in weights.shapes]
    quantized: list[str] = []
    for shard in (shard for module in model.quantized_modules() for shard in module.shards):
        if shard.format is None:
            targets[f"{shard.name}.weight"] = torch.empty(shard.out_features, shard.in_features, device="meta")
            continue
        try:
            missing += check_shard(weights, shard)
            suffixes = tensor_specs(shard)
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error}") from error
        quantized += [name for suffix in suffixes if (name := f"{shard.name}.{suffix}") in weights.shapes]
    known = {*targets, *quantized}
    unexpected = [
        name
        for name in weights.shapes
        if name not in known and not model.ignored(name) and not is_attention_scale(name)
    ]
    if missing or unexpected:
        raise ModelLoadError(
            f"{path}: the checkpoint does not fit its config: {_listing('missing', missing)}"
            f"{'; ' if missing and unexpected else ''}{_listing('unexpected', unexpected)}"
        )
    for name, target in targets.items():
        if weights.shapes[name] != tuple(target.shape):
            raise ModelLoadError(
                f"{path}: tensor {name}: expected shape {list(target.shape)}, found {list(weights.shapes[name])}"
            )
    return sum(weights.stored_bytes(name) for name in quantized)


@dataclass(frozen=True)
class Piece:
    """Rows of one tensor, as many as are read at once."""

    name: str
    first_row: int
    target: Tensor


def read_tensors(
    weights: WeightSource,
    targets: Mapping[str, Tensor],
    progress: Progress,
    num_threads: int,
    staging: Staging | None = None,
) -> None:
    """Fills all targets from a few threads: copying and dequantizing release the interpreter lock.

    staging: for targets that are not in host memory. Each tensor then travels in pieces, in the order of the file, in
    the narrower of its stored dtype and its target's.
    """
    pieces = _tensors_largest_first(targets) if staging is None else _pieces(weights, targets, staging.buffer_bytes)
    total, done = sum(target.nbytes for target in targets.values()), 0

    @torch.inference_mode()  # the mode is a thread's own: the caller may have allocated the targets in it
    def read(piece: Piece) -> None:
        if staging is None:
            weights.read_into(piece.name, piece.target)
            return
        dtype = _narrower(weights.dtype(piece.name), piece.target.dtype)
        staging.write(piece.target, dtype, lambda staged: weights.read_into(piece.name, staged, piece.first_row))

    with ThreadPoolExecutor(num_threads, thread_name_prefix="load") as pool:
        reads = {pool.submit(read, piece): piece for piece in pieces}
        try:
            for finished in as_completed(reads):
                finished.result()
                done += reads[finished].target.nbytes
                progress(done / total, reads[finished].name)
        finally:
            pool.shutdown(cancel_futures=True)
    if staging is not None:
        staging.finish()


def _tensors_largest_first(targets: Mapping[str, Tensor]) -> list[Piece]:
    return [Piece(name, 0, targets[name]) for name in sorted(targets, key=lambda name: -targets[name].nbytes)]


def _pieces(weights: WeightSource, targets: Mapping[str, Tensor], max_bytes: int) -> Iterator[Piece]:
    for name in weights.shapes:
        if (target := targets.get(name)) is not None:
            row_bytes = target[0].numel() * _narrower(weights.dtype(name), target.dtype).itemsize
            rows = max_bytes // row_bytes
            for start in range(0, len(target), rows):
                yield Piece(name, start, target[start : start + rows])


def _narrower(stored: torch.dtype, target: torch.dtype) -> torch.dtype:
    """What is copied to the device: converting to fewer bytes is the host's work, all other conversion the device's."""
    return stored if stored.itemsize <= target.itemsize else target


def _staging(model: DecoderModel, device: torch.device, num_threads: int) -> Staging | None:
    if device.type == "cpu":
        return None
    longest_row = max(target[0].nbytes for target in model.load_targets().values())
    return cuda_staging(device, 2 * num_threads, max(_STAGING_BYTES, longest_row))


def _set_kv_scales(model: Model, weights: WeightSource | None, path: Path, device: torch.device) -> None:
    layers, num_kv_heads = model.attention_layers, model.config.num_kv_heads
    try:
        scales = None if weights is None else read_kv_scales(weights, len(layers), num_kv_heads)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    if scales is None:
        logger.info("fp8 KV cache: the checkpoint has no k_scale and v_scale, keys and values are stored with scale 1")
        scales = torch.ones(len(layers), 2, num_kv_heads)
    for layer, layer_scales in zip(layers, scales.to(device), strict=True):
        layer.kv_scales = layer_scales


def _listing(kind: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} tensors {kind}: {', '.join(names[:5])}{more}"


def _no_progress(fraction: float, text: str) -> None:
    pass
