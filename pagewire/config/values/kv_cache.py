"""States what values of `--kv-cache-dtype` mean, and refuses some: sentences as in `values.executor`."""

from pagewire.config.executor import SMALLEST


def in_8_bits(cache_dtype: str) -> str | None:
    """Returns what a value of --kv-cache-dtype means if it is of 8 bits: fp8, int8 or, for others, None."""
    return "int8" if cache_dtype == "int8" else "fp8" if cache_dtype in ("fp8", "fp8_e4m3", SMALLEST) else None


def of_cache_dtype(cache_dtype: str, dtype: str) -> str | None:
    """Refuses a cache of another type than the model's, which is `dtype`."""
    if in_8_bits(cache_dtype) or cache_dtype in ("auto", dtype):
        return None
    return (
        f"--kv-cache-dtype {cache_dtype}: keys and values are stored as the model computes ({dtype}) or in 8 bits; "
        f"use --kv-cache-dtype auto, int8 or fp8, or --dtype {cache_dtype}"
    )


def of_8_bit_cache(cache_dtype: str) -> str:
    """Refuses --kv-cache-dtype int8 and fp8 for layers that store something else."""
    return (
        f"--kv-cache-dtype {cache_dtype}: the model stores a latent or a state in place of keys and values, which "
        f"cannot be {cache_dtype}; leave the flag out"
    )
