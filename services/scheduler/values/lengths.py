"""The error for a prompt that is too long."""

from pagewire.services.scheduler.values.executor_info import ExecutorInfo


def too_long(num_prompt_tokens: int, info: ExecutorInfo, yields_vector: bool) -> str:
    """Returns the error for a prompt of more than info.max_prompt_tokens() tokens."""
    if num_prompt_tokens + (not yields_vector) > info.max_model_len:
        what_is_left = "" if yields_vector else "; at least one must be left for the output"
        return (
            f"This model's maximum context length is {info.max_model_len} tokens, but the prompt has "
            f"{num_prompt_tokens} tokens{what_is_left}. Please shorten the prompt."
        )
    return (
        f"the prompt has {num_prompt_tokens} tokens, but the KV cache holds {info.num_blocks} blocks of "
        f"{info.block_size} tokens = {info.max_num_tokens}; shorten the prompt or raise the executor's "
        "--kv-cache-memory-bytes, --gpu-memory-utilization or --num-gpu-blocks-override"
    )
