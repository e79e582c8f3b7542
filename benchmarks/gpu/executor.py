"""The executor on a GPU, in one command: `python -m benchmarks.gpu.executor [--model MODEL] [--device cpu]`.

First correctness: every op against its reference on the device, then a model's greedy tokens on the device against
the CPU's, in fp32. Then decode and prefill speed in bf16 through the model runner, without services. Ends with a
short table. `--device cpu` proves the script where there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kernels  # noqa: F401  (registers the ops)
from kernels import reference
from pagewire.config import DEFAULT_MODEL, ExecutorConfig
from pagewire.models import resolve_model
from services.executor.model_runner import ModelRunner
from services.executor.startup import start_runner
from services.executor.step import NewRequest, RowSampling, Step

BLOCK_SIZE = 16
PROMPT = list(range(100, 400, 3))
NUM_NEW_TOKENS = 32
KV_CACHE_BYTES = 2 << 30
BLOCKS_PER_REQUEST = 18


def check_ops(device: torch.device) -> list[str]:
    """Names of ops that differ from their reference in fp16 on the device."""
    torch.manual_seed(0)
    ops = torch.ops.pagewire

    def half(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float16).to(device)

    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    kv_cache = half(64, 2, 3, BLOCK_SIZE, 64)
    blocks = torch.randperm(64)[:60].reshape(3, 20).int().to(device)
    attention = (half(38, 9, 64), kv_cache, blocks, ints([0, 1, 34, 38]), ints([200, 33, 104]), 33, 0.125)
    x, weight, wide = half(40, 576), half(576), half(40, 3072)
    query, key, cos_sin = half(38, 9, 64), half(38, 3, 64), torch.randn(256, 64).to(device)
    positions = torch.randint(0, 256, (38,)).to(device)
    slots = torch.randperm(1024)[:38].to(device)
    cases: dict[str, Callable[[Any], list[Tensor]]] = {
        "paged_attention": lambda m: [m.paged_attention(*attention)],
        "paged_attention, window and soft cap": lambda m: [m.paged_attention(*attention, 20, 30.0)],
        "store_kv": lambda m: _mutated(m.store_kv, [key, key, kv_cache], slots),
        "rms_norm": lambda m: [m.rms_norm(x, weight, 1e-5)],
        "add_rms_norm": lambda m: [m.add_rms_norm(x, x.clone(), weight, 1e-5)],
        "rotary_embedding": lambda m: _rotated(m.rotary_embedding, positions, query, key, cos_sin),
        "silu_and_mul": lambda m: [m.silu_and_mul(wide)],
        "gelu_tanh_and_mul": lambda m: [m.gelu_tanh_and_mul(wide)],
        "linear": lambda m: [m.linear(x, half(96, 576).zero_() + weight, None)],
    }
    wrong = []
    for name, case in cases.items():
        for actual, expected in zip(case(ops), case(reference), strict=True):
            error = (actual.float() - expected.float()).abs().max().item()
            scale = expected.float().abs().max().item()
            if not error <= 1e-2 * scale:
                wrong.append(f"{name}: error {error:.3g} at values up to {scale:.3g}")
    return wrong


def _mutated(store: Callable[..., None], tensors: list[Tensor], slots: Tensor) -> list[Tensor]:
    key, value, cache = tensors[0], tensors[1], tensors[2].clone()
    store(key, value, cache, slots)
    return [cache]


def _rotated(
    rotate: Callable[..., None], positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor
) -> list[Tensor]:
    query, key = query.clone(), key.clone()
    rotate(positions, query, key, cos_sin, 64)
    return [query, key]


def make_runner(model: str, device: str, dtype: str) -> ModelRunner:
    config = ExecutorConfig(
        model=model,
        device=device,
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
    )
    return start_runner(config, model, lambda fraction, text: None)[0]


def step(step_id: int, num_requests: int, num_tokens: int, prompt: list[int] | None = None) -> Step:
    """All requests compute num_tokens; with a prompt they are new."""
    first = [index * BLOCKS_PER_REQUEST for index in range(num_requests)]
    new = [
        NewRequest(
            request_id=index,
            token_ids=np.array(prompt, dtype=np.int32),
            num_prompt_tokens=len(prompt),
            num_computed_tokens=0,
            block_ids=np.arange(first[index], first[index] + BLOCKS_PER_REQUEST, dtype=np.int32),
            sampling=RowSampling(temperature=0.0),
        )
        for index in range(num_requests)
        if prompt is not None
    ]
    return Step(
        step_id=step_id,
        request_ids=list(range(num_requests)),
        num_scheduled_tokens=np.full(num_requests, num_tokens, dtype=np.int64),
        num_new_blocks=np.zeros(num_requests, dtype=np.int64),
        new_block_ids=np.empty(0, dtype=np.int32),
        new_requests=new,
    )


def greedy(runner: ModelRunner) -> list[int]:
    runner.reset()
    outputs = [runner.execute(step(1, 1, len(PROMPT), PROMPT))]
    # Launched without reading results in between, as the service does.
    outputs += [runner.execute(step(2 + index, 1, 1)) for index in range(NUM_NEW_TOKENS - 1)]
    return [int(output.wait().token_ids[0]) for output in outputs]


def seconds_per_step(runner: ModelRunner, num_requests: int, num_steps: int = 64) -> float:
    """Decode steps at 32 to 104 tokens of context, launched back to back."""
    runner.reset()
    prompt = PROMPT[:32]
    runner.execute(step(1, num_requests, len(prompt), prompt)).wait()
    for index in range(8):
        runner.execute(step(2 + index, num_requests, 1)).wait()
    started = time.perf_counter()
    outputs = [runner.execute(step(10 + index, num_requests, 1)) for index in range(num_steps)]
    for output in outputs:
        output.wait()
    return (time.perf_counter() - started) / num_steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    model = str(resolve_model(arguments.model))
    wrong = check_ops(torch.device(arguments.device))
    expected = greedy(make_runner(model, "cpu", "float32"))
    actual = greedy(make_runner(model, arguments.device, "float32"))
    rows = [f"op wrong      {line}" for line in wrong] or ["ops           equal their references"]
    rows.append(f"greedy fp32   {'equal to the CPU' if actual == expected else f'{actual} instead of {expected}'}")
    runner = make_runner(model, arguments.device, "bfloat16")
    for num_requests in (1, 8, 64) if arguments.device == "cpu" else (1, 8, 64, 256):
        seconds = seconds_per_step(runner, num_requests)
        rows.append(f"decode {num_requests:4}   {seconds * 1e3:8.3f} ms/step   {num_requests / seconds:9.0f} tok/s")
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    print(f"\n{model.rsplit('/', 1)[-1]} on {name}, torch {torch.__version__}")
    print("\n".join(rows))
    return 1 if wrong or actual != expected else 0


if __name__ == "__main__":
    sys.exit(main())
