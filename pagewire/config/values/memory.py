"""Settings that need more memory than this machine has: commands check them by the model's files before they start
anything, the executor when it knows the model."""

from pagewire.config.executor import OFFLOADING_DIR_GIB, ExecutorConfig

_TOKEN_ID, _OF_STEP = 4, 32  # bytes of a token in a row, and of one in a step


def of_rows(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, available: int) -> str | None:
    """Returns why rows and steps of these sizes are refused; None if their buffers may fit. available: bytes."""
    rows, step = _TOKEN_ID * max_num_seqs * max_model_len, _OF_STEP * max_num_batched_tokens
    if rows + step <= available:
        return None
    what = f"--max-num-seqs {max_num_seqs}: the rows of so many requests of up to {max_model_len} tokens need"
    remedy = "lower it, or --max-model-len"
    if step > rows:
        what, remedy = f"--max-num-batched-tokens {max_num_batched_tokens}: so large a step needs", "lower it"
    return f"{what} at least {_mib(rows + step)}, and {_mib(available)} are free; {remedy}"


def of_large_cache(num_bytes: int, available: int, where: str = "this machine") -> str | None:
    """Returns why `--kv-cache-memory-bytes` is refused as too large; None if it is not. available: bytes."""
    if num_bytes <= available:
        return None
    return (
        f"--kv-cache-memory-bytes {num_bytes}: the KV cache would be {_mib(num_bytes)}, {where} has "
        f"{_mib(available)} free; lower it"
    )


def of_small_cache(num_bytes: int, bytes_per_token: int, max_model_len: int) -> str | None:
    """Returns why `--kv-cache-memory-bytes` is refused as too small for one request; None if it is not.

    bytes_per_token: of keys and values; 0: not known.
    """
    if not bytes_per_token or num_bytes >= bytes_per_token * max_model_len:
        return None
    most = num_bytes // bytes_per_token
    fewer = f"lower --max-model-len to {most} or less, or " if most > 1 else ""
    return (
        f"--kv-cache-memory-bytes {num_bytes}: the KV cache would be {_mib(num_bytes)}, {most} tokens, but one request "
        f"of {max_model_len} tokens needs {_mib(bytes_per_token * max_model_len)}; {fewer}raise it"
    )


def of_tiers(config: ExecutorConfig, role: str) -> str | None:
    """Returns why copies of KV blocks outside of the cache are refused; None if they are not."""
    if role != "both" and config.num_ranks > 1:
        return (
            f"--role {role}: an executor of {config.num_ranks} processes sends no KV blocks to others and takes none; "
            "leave it out"
        )
    if config.kv_offloading_dir is None and config.kv_offloading_dir_size != OFFLOADING_DIR_GIB:
        return (
            f"--kv-offloading-dir-size {config.kv_offloading_dir_size:g}: no directory is bounded by it; add "
            "--kv-offloading-dir, or leave it out"
        )
    return None


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 1024**2:,.1f} MiB"


def of_blocks(block_size: int, state_block_size: int) -> str | None:
    if state_block_size % block_size == 0:
        return None
    return f"--state-block-size {state_block_size} is not a multiple of --block-size {block_size}; use one"
