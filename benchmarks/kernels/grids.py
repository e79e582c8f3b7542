"""The configurations that are tried of each kernel: no more than can win."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from pagewire.kernels.triton.products.grouped_layout import tile_inputs

Config = Mapping[str, int]
Grid = Mapping[str, tuple[int, ...]]

# As library_rows and block_library_rows: more tokens than there are.
ALWAYS_OURS = 1 << 30
_PRODUCT_TILES: Grid = {
    "block_m": (16, 32, 64, 128),
    "block_n": (64, 128),
    "block_k": (64, 128),
    "num_warps": (4, 8),
    "num_stages": (3, 4),
}
# What a kernel is compiled for. All combinations are tried that `can_win`.
COMPILED: dict[str, Grid] = {
    "decode_attention": {"block_n": (32, 64, 128), "num_warps": (1, 4, 8), "num_stages": (2, 3, 4)},
    "prefill_attention": {
        "block_m": (64, 128),
        "block_n": (32, 64, 128),
        "descriptors": (0, 1),
        "num_warps": (4, 8),
        "num_stages": (2, 3),
    },
    "fp8_product": {**_PRODUCT_TILES, "library_rows": (ALWAYS_OURS,), "block_library_rows": (ALWAYS_OURS,)},
    "fp8_weight_only": {**_PRODUCT_TILES, "library_rows": (ALWAYS_OURS,)},
    "int8_product": _PRODUCT_TILES,
    "experts": {**_PRODUCT_TILES, "block_m": (8, 16, 32, 64, 128), "block_n": (32, 64, 128), "num_warps": (2, 4, 8)},
    "grouped_gemm": {
        "block_m": (8, 16, 32, 64, 128, 256),
        "block_n": (64, 128, 256),
        "num_warps": (2, 4, 8),
        "num_stages": (3, 4),
        "library_rows": (ALWAYS_OURS,),
        "wide": (0, 1),
    },
    "skinny_product": {
        "block_n": (32, 64, 128),
        "block_k": (64, 128, 256),
        "num_warps": (2, 4),
        "num_stages": (3, 4),
        "library_rows": (ALWAYS_OURS,),
    },
    "grouped_skinny": {
        "block_n": (64, 128, 256),
        "num_warps": (2, 4),
        "num_stages": (3, 4),
        "apart_rows": (ALWAYS_OURS,),
    },
}
# What a launch decides. All combinations are tried with the best compiled forms.
LAUNCHED: dict[str, Grid] = {
    "decode_attention": {"programs_per_sm": (1, 2, 3, 4, 6, 8), "min_split": (64, 128, 256, 512)},
    "prefill_attention": {},
    "fp8_product": {
        "programs_per_sm": (1, 2, 3, 4),
        "library_rows": (1, ALWAYS_OURS),
        "block_library_rows": (1, ALWAYS_OURS),
    },
    "fp8_weight_only": {"programs_per_sm": (1, 2, 3, 4), "library_rows": (1, ALWAYS_OURS)},
    "int8_product": {"programs_per_sm": (1, 2, 3, 4)},
    "experts": {},
    "grouped_gemm": {"programs_per_sm": (1, 2, 3, 4, 6, 8), "library_rows": (1, ALWAYS_OURS)},
    "skinny_product": {"programs_per_sm": (1, 2, 3, 4, 6), "library_rows": (1, ALWAYS_OURS)},
    "grouped_skinny": {"programs_per_sm": (1, 2, 3, 4, 6), "apart_rows": (1, ALWAYS_OURS)},
}
_INTERPRETED: Grid = {"block_n": (16,)}
# Of a thread: more spill, and with fewer a warp has too little to do.
_MOST_SUMS, _LEAST_SUMS = 128, 4
_MOST_PREFILL_SUMS = 192  # what compiles without spills, beside addresses
_SHARED_BYTES = 227 * 1024  # of the largest architecture
# Up to how many rows a group's sums are scaled, and in blocks of how many its weights are: between them both are tried.
_MOST_NARROW_ROWS, _LEAST_WIDE_ROWS = 128, 64


def variations(configs: Sequence[Config], grid: Grid) -> list[Config]:
    """Each configuration, and it with every combination of the grid's values."""
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [*configs, *({**config, **values} for config in configs for values in combinations)]


def forms_of(kernel: str, shape: Mapping[str, int], present: Config, interpreted: bool = False) -> list[Config]:
    """Returns what is compiled for a shape, the present configuration first. In the interpreter, where all are slow,
    two."""
    first, *others = variations([present], _INTERPRETED if interpreted else COMPILED[kernel])
    return [first, *(config for config in others if interpreted or can_win(kernel, shape, config))]


def launches_of(kernel: str, finalists: Sequence[Config], interpreted: bool = False) -> list[Config]:
    grid = LAUNCHED[kernel]
    found = variations(finalists, {key: values[:1] for key, values in grid.items()} if interpreted else grid)
    # Wide products are not split for the sake of more programs.
    return [config for config in found if not config.get("wide") or config["programs_per_sm"] == 1]


def can_win(kernel: str, shape: Mapping[str, int], config: Config) -> bool:
    """False for what wastes most of a tile, spills its sums, leaves warps idle, or cannot fit into shared memory."""
    threads = 32 * config["num_warps"]
    if kernel == "decode_attention":
        # Keys and values of each stage.
        staged = 2 * config["block_n"] * shape["head_dim"] * shape["kv_bytes"] * config["num_stages"]
        # One warp has no barriers between warps, and is for small tiles.
        is_small = config["block_n"] == 32 and shape["query_len"] == 1 and shape["kv_bytes"] < 4
        return staged <= _SHARED_BYTES and (config["num_warps"] > 1 or is_small)
    if kernel == "prefill_attention":
        staged = 2 * config["block_n"] * shape["head_dim"] * shape["kv_bytes"] * config["num_stages"]
        sums = config["block_m"] * (shape["head_dim"] + config["block_n"]) / threads
        if config["descriptors"]:
            described = shape["block_size"] >= config["block_n"] > 32 and shape["kv_bytes"] == 2
            few = config["num_warps"] == (4 if shape["head_dim"] <= 128 else 8)
            return described and few and staged <= _SHARED_BYTES and sums <= _MOST_PREFILL_SUMS
        return staged <= _SHARED_BYTES and sums <= _MOST_PREFILL_SUMS
    if kernel == "skinny_product":  # each warp has 16 rows of a product, or more
        staged = 2 * config["block_n"] * config["block_k"] * config["num_stages"]
        return config["block_n"] >= 16 * config["num_warps"] and staged <= _SHARED_BYTES
    if kernel == "grouped_skinny":
        return 32 <= config["block_n"] // config["num_warps"] <= 64
    if kernel == "experts" and not _experts_can_win(shape, config):
        return False
    sums = config["block_m"] * config["block_n"] / threads
    if kernel == "grouped_gemm" and not _grouped_can_win(shape, config, sums):
        return False
    rows = 1 << max(0, shape["tokens"] - 1).bit_length()  # the power of two that holds them all
    least, most = min(COMPILED[kernel]["block_m"]), max(COMPILED[kernel]["block_m"])
    fitting = min(max(rows, least), most)
    return config["block_m"] in (fitting, max(least, fitting // 2)) and _LEAST_SUMS <= sums <= _MOST_SUMS


def _grouped_can_win(shape: Mapping[str, int], config: Config, sums: float) -> bool:
    """As `can_win`, of what only these products have."""
    if not config["wide"]:  # which has sums of a group beside those of all
        return sums <= _MOST_SUMS / 2 and shape["tokens"] <= _MOST_NARROW_ROWS
    inputs = tile_inputs(shape["bits"], shape["group"])
    staged = (2 * inputs * config["block_m"] + inputs * shape["bits"] // 8 * config["block_n"]) * config["num_stages"]
    warps_fit = config["block_n"] >= 16 * config["num_warps"] >= 64  # whole groups of four, each with 64 outputs
    return config["block_m"] >= _LEAST_WIDE_ROWS and warps_fit and sums >= 32 and staged <= _SHARED_BYTES


def _experts_can_win(shape: Mapping[str, int], config: Config) -> bool:
    """As `can_win`, of what only these products have."""
    if config["block_n"] == 32:  # for the sake of more programs
        return config["block_m"] == 8 and config["num_warps"] == 2 and shape["x_bytes"] == 2
    # Products of converted weights are a warp's, with few rows each; others take four warps together.
    return config["num_warps"] != (2 if shape["x_bytes"] == shape["weight_bytes"] else 8)
