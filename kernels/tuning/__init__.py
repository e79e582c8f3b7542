"""Launch configurations of the Triton kernels: looked up in tables, never searched for while serving.

A table is a file `kernels/tuning/sm_<capability>/<kernel>.json`, written by `python -m benchmarks.kernels tune`:

    {"kernel": ..., "architecture": "sm_90", "provenance": {"measured": null or {...}, ...},
     "entries": [{"shape": {"head_dim": 128, ...}, "config": {"block_n": 64, ...}}, ...]}

An entry is for one shape; every other shape uses that of its nearest match (`lookup`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

__all__ = [
    "KERNELS",
    "Entry",
    "Keys",
    "capability_of",
    "load_table",
    "lookup",
    "nearest",
    "table_architecture",
    "table_path",
]

DIRECTORY = Path(__file__).parent
# The interpreter's assumed architecture: the one with the largest tiles.
INTERPRETED_CAPABILITY = 90
INTERPRETED_MULTIPROCESSORS = 4
# Architectures with as much shared memory per block (99 KiB) as sm_89, and less than the table below them allows for.
_AS_SM_89 = (86, 120, 121)


@dataclass(frozen=True)
class Keys:
    """The keys of a kernel's table.

    A tile must fit the shape in the `bounds`: the match is the next larger one listed (the largest if all are
    smaller). It should suit the shape in the `distances`: the match has the least sum of |log2(listed / asked)|.
    """

    bounds: tuple[str, ...]
    distances: tuple[str, ...]
    config: tuple[str, ...]

    @property
    def shape(self) -> tuple[str, ...]:
        return self.bounds + self.distances


_ATTENTION_BOUNDS = ("head_dim", "kv_bytes", "block_size")  # kv_bytes: of one stored element
_ATTENTION_DISTANCES = ("group", "batch", "query_len")  # query_len: the longest of the batch
_PRODUCT_DISTANCES = ("tokens", "outputs", "inputs")  # of x [tokens, inputs] @ weight [outputs, inputs].T
_PRODUCT_CONFIG = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "programs_per_sm")
_SWITCHES = ("descriptors", "wide")  # of a configuration: 0 or 1
KERNELS = {
    "decode_attention": Keys(
        _ATTENTION_BOUNDS,
        (*_ATTENTION_DISTANCES, "context"),  # tokens that a request may have, at most
        ("block_n", "num_warps", "num_stages", "programs_per_sm", "min_split"),
    ),
    "prefill_attention": Keys(
        _ATTENTION_BOUNDS,
        _ATTENTION_DISTANCES,
        ("block_m", "block_n", "descriptors", "num_warps", "num_stages"),
    ),
    # library_rows: from how many tokens on a library's product is faster; block_library_rows: with scales per block.
    "fp8_product": Keys((), _PRODUCT_DISTANCES, (*_PRODUCT_CONFIG, "library_rows", "block_library_rows")),
    "fp8_weight_only": Keys(("x_bytes",), _PRODUCT_DISTANCES, (*_PRODUCT_CONFIG, "library_rows")),
    "skinny_product": Keys(
        (),
        _PRODUCT_DISTANCES,
        ("block_n", "block_k", "num_warps", "num_stages", "programs_per_sm", "library_rows"),
    ),
    # apart_rows: from how many tokens on norm, product and activation in three launches are faster.
    "grouped_skinny": Keys(
        ("bits",),
        ("group", *_PRODUCT_DISTANCES),
        ("block_n", "num_warps", "num_stages", "programs_per_sm", "apart_rows"),
    ),
    "int8_product": Keys((), _PRODUCT_DISTANCES, _PRODUCT_CONFIG),
    # group: inputs that share a scale.
    "grouped_gemm": Keys(
        ("bits", "tokens"),
        ("group", "outputs", "inputs"),
        # wide: 1 where weights are rounded before they are multiplied (`products.grouped_wide`), else 0.
        ("block_m", "block_n", "num_warps", "num_stages", "programs_per_sm", "library_rows", "wide"),
    ),
    # Products with experts' weights. tokens: of an expert on average; x_bytes: of an element, 1 where x is quantized.
    "experts": Keys(
        ("x_bytes", "weight_bytes", "tokens"),
        ("outputs", "inputs"),
        ("block_m", "block_n", "block_k", "num_warps", "num_stages"),
    ),
}


@dataclass(frozen=True)
class Entry:
    shape: Mapping[str, int]
    config: Mapping[str, int]


@cache
def capability_of(device: torch.device) -> int:
    """Returns the compute capability, 90 for 9.0; a CPU device means Triton's interpreter."""
    if device.type != "cuda":
        return INTERPRETED_CAPABILITY
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU; a few where Triton interprets."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else INTERPRETED_MULTIPROCESSORS
    )


@lru_cache(maxsize=4096)
def lookup(kernel: str, capability: int, **shape: int) -> Mapping[str, int]:
    """Returns the configuration of `kernel` (a key of KERNELS) for a shape, which names each of the kernel's shape
    keys.

    The bounds are matched one after the other, then the distances; a tie goes to the larger shape.
    A warm call costs well under a microsecond. ValueError: unknown kernel, wrong keys, no table, or a corrupt one.
    """
    if kernel not in KERNELS:
        raise ValueError(f"no tuning table for a kernel {kernel!r}; there are {', '.join(KERNELS)}")
    keys = KERNELS[kernel]
    if set(shape) != set(keys.shape) or min(shape.values()) < 1:
        raise ValueError(f"{kernel} is looked up with positive {', '.join(keys.shape)}; got {shape}")
    return nearest(keys, load_table(kernel, table_architecture(kernel, capability)), shape).config


def nearest(keys: Keys, entries: Sequence[Entry], shape: Mapping[str, int]) -> Entry:
    """Returns the entry that `lookup` matches, among these."""
    for key in keys.bounds:
        listed = {entry.shape[key] for entry in entries}
        match = min((value for value in listed if value >= shape[key]), default=max(listed))
        entries = [entry for entry in entries if entry.shape[key] == match]

    def distance(entry: Entry) -> tuple[float, ...]:
        doublings = sum(abs(math.log2(entry.shape[key] / shape[key])) for key in keys.distances)
        return (round(doublings, 6), *(-entry.shape[key] for key in keys.distances))

    return min(entries, key=distance)


@cache
def table_architecture(kernel: str, capability: int) -> int:
    """Returns the architecture of the table for a device: its own, or the nearest one that needs no more than the
    device has."""
    tables = sorted(int(path.parent.name.removeprefix("sm_")) for path in DIRECTORY.glob(f"sm_*/{kernel}.json"))
    wanted = 89 if capability in _AS_SM_89 and capability not in tables else capability
    found = [architecture for architecture in tables if architecture <= wanted]
    if not found:
        raise ValueError(f"{kernel} needs a GPU of compute capability 8.0 or above, this one has {capability / 10}")
    return found[-1]


def table_path(directory: Path, kernel: str, architecture: int) -> Path:
    """Returns the path of a kernel's table for an architecture."""
    return directory / f"sm_{architecture}" / f"{kernel}.json"


@cache
def load_table(kernel: str, architecture: int) -> tuple[Entry, ...]:
    """Returns the entries of a table, checked. Raises ValueError, which names the file and the remedy."""
    path = table_path(DIRECTORY, kernel, architecture)
    try:
        return _parse(kernel, architecture, json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"tuning table {path} cannot be used: {type(error).__name__}: {error}. "
            f"Install pagewire again, or write the table with: python -m benchmarks.kernels tune --kernel {kernel}"
        ) from error


def _parse(kernel: str, architecture: int, table: Any) -> tuple[Entry, ...]:
    keys = KERNELS[kernel]
    if (table["kernel"], table["architecture"]) != (kernel, f"sm_{architecture}"):
        raise ValueError(f"it is the table of {table['kernel']} for {table['architecture']}")
    entries = []
    for entry in table["entries"]:
        _check(entry["shape"], keys.shape)
        _check(entry["config"], keys.config)
        for key in ("block_m", "block_n", "block_k", "num_warps"):
            if key in keys.config and entry["config"][key].bit_count() != 1:
                raise ValueError(f"{key} is no power of two in {entry}")
        entries.append(Entry(MappingProxyType(entry["shape"]), MappingProxyType(entry["config"])))
    if not entries:
        raise ValueError("it has no entries")
    if len({tuple(entry.shape[key] for key in keys.shape) for entry in entries}) < len(entries):
        raise ValueError("a shape is listed twice")
    return tuple(entries)


def _check(values: dict[str, int], keys: tuple[str, ...]) -> None:
    if set(values) != set(keys):
        raise ValueError(f"{values} should have the keys {', '.join(keys)}")
    if not all(type(value) is int and value >= (key not in _SWITCHES) for key, value in values.items()):
        raise ValueError(f"{values} should have positive integers")
