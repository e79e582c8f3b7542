"""Measures a step on a CPU, kernel by kernel: `python -m benchmarks.executor_step [MODEL] [--quantization none]`.

Runs decode steps of several numbers of requests, and prompts, without sampling. Each kernel's calls are timed one by
one; "eager" is the step from Python, "replayed" the recorded step, as the executor runs small ones. The floor is the
time to read weights and KV cache once at the present rate of this machine's memory. `--json-out FILE` measures curves
instead: the replayed decode step of --requests by --contexts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.curves.output import CurveOutput
from pagewire.config import DEFAULT_MODEL
from pagewire.files.models import resolve_model
from pagewire.kernels.cpu.recording import Memory, Recorded, record
from pagewire.kernels.cpu.runtime import library
from pagewire.services.executor.batch import kv_cache
from pagewire.services.executor.graphs.recorded_steps import MOST_TOKENS
from pagewire.services.executor.layers.kv_spec import CacheSpec, StateSpec
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.step.step_context import StepContext
from pagewire.tools.bench.curves import Point

BLOCK_SIZE = 16
READ_BYTES = 1 << 29
REQUESTS = (1, 8, 32, 64)
PROMPTS = (256, 2048)
CURVE_ROUNDS = 9
CURVE_REQUESTS = (1, 8, 32)
CURVE_CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
KERNELS = {
    "products": (
        "grouped_linear",
        "grouped_gated_linear",
        "packed_linear",
        "packed_gated_linear",
        "linear",
        "linear_many",
    ),
    "attention": ("paged_attention",),
    "norms": ("add_rms_norm", "rms_norm", "layer_norm"),
    "rotary, KV": ("rotary_store_kv", "store_kv"),
    "activations": ("gated", "activated"),
    "embedding": ("grouped_embedding", "packed_embedding"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--quantization", help="as of `pagewire serve`")
    parser.add_argument("--model-impl", default="auto", help="as of `pagewire serve`")
    parser.add_argument("--load-format", default="auto", help="as of `pagewire serve`; dummy: random weights")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, default=128, help="tokens before the one that a request decodes")
    parser.add_argument("--requests", type=int, nargs="+", default=CURVE_REQUESTS, help="of the curves")
    parser.add_argument("--contexts", type=int, nargs="+", default=CURVE_CONTEXTS, help="of the curves, tokens")
    output = CurveOutput(parser, "Pagewire")
    args = output.args
    if min(*args.requests, *args.contexts, args.threads) < 1 or args.context < 0:
        parser.error("--requests, --contexts and --threads are at least 1, --context at least 0")
    torch.set_num_threads(args.threads)
    model = load_model(
        resolve_model(args.model),
        dtype="bfloat16",
        device=torch.device("cpu"),
        quantization=args.quantization,
        model_impl=args.model_impl,
        load_format=args.load_format,
    )
    longest = model.config.max_position_embeddings
    if args.json_out:
        contexts = [context for context in args.contexts if context <= longest]
        if not contexts:
            parser.error(f"--contexts: the model has {longest} positions")
        take_curves(model, args.requests, contexts, partial(output.put, "context-length", args.model))
    elif max(args.context + 1, *PROMPTS) > longest:
        parser.error(f"the model has {longest} positions: the table takes {max(args.context + 1, *PROMPTS)}")
    else:
        print_table(model, args.context)


def print_table(model: Model, context: int) -> None:
    bind_cache(model, max(max(REQUESTS) * blocks_of(context + 1), blocks_of(max(PROMPTS))))
    rate = read_rate()
    threads = torch.get_num_threads()
    print(f"{threads} threads, memory read at {rate / 1e9:.0f} GB/s, {context} tokens of context; ms per step")
    print(f"{'step':16}", *(f"{name:>10}" for name in (*KERNELS, "eager", "replayed", "floor")), flush=True)
    for num_requests in REQUESTS:
        step = Step.decode(model, num_requests, context)
        print(f"{f'{num_requests} requests':16}", *step.columns(rate, replays=True), flush=True)
    for length in PROMPTS:
        step = Step.prompt(model, length)
        print(f"{f'prompt of {length}':16}", *step.columns(rate, replays=length <= MOST_TOKENS), flush=True)


def take_curves(
    model: Model, requests: Sequence[int], contexts: Sequence[int], put: Callable[[Sequence[Point], str], None]
) -> None:
    """A context counts the token that the step computes."""
    bind_cache(model, max(requests) * blocks_of(max(contexts)))
    print(f"{'requests':>10}{'context':>10}{'ms':>10}")
    for num_requests in requests:
        points: list[Point] = []
        for context in contexts:
            milliseconds = 1e3 * Step.decode(model, num_requests, context - 1).replayed(CURVE_ROUNDS)
            print(f"{num_requests:>10}{context:>10}{milliseconds:>10.2f}", flush=True)
            points.append({"context_tokens": context, "num_requests": num_requests, "step_ms": milliseconds})
            put(points, f"{num_requests} request{'s' if num_requests > 1 else ''}")


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def bind_cache(model: Model, num_blocks: int) -> None:
    groups = len(kv_cache.groups(model))
    for cache in kv_cache.allocate(model, [num_blocks] * groups, BLOCK_SIZE, torch.device("cpu")):
        # Written, since memory that never was is one page of zeros, which the processor's caches hold.
        if cache.dtype is torch.int8:
            cache.fill_(60)  # scales of 0.01
        else:
            cache.copy_(torch.randn(cache.shape[1:]))


def _read_tokens(spec: CacheSpec, seq_len: int) -> int:
    """Of which something is kept; a state counts as one."""
    return 1 if isinstance(spec, StateSpec) else min(seq_len, spec.window or seq_len)


def read_rate() -> float:
    """Bytes per second."""
    data = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    return READ_BYTES / best_time(data.sum, 5)


def best_time(function: Callable[[], object], rounds: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds"""
    best = float("inf")
    for _ in range(rounds):
        started = clock()
        function()
        best = min(best, clock() - started)
    return best


@dataclass(frozen=True)
class Step:
    """Requests of equal length; all their tokens of this step are in input_ids."""

    model: Model
    input_ids: Tensor
    context: StepContext
    read_bytes: int

    @classmethod
    def decode(cls, model: Model, num_requests: int, context: int) -> Step:
        return cls._of(model, num_requests, context, 1)

    @classmethod
    def drafted(cls, model: Model, num_requests: int, context: int, query_len: int) -> Step:
        return cls._of(model, num_requests, context, query_len)

    @classmethod
    def prompt(cls, model: Model, length: int) -> Step:
        return cls._of(model, 1, 0, length)

    @classmethod
    def _of(cls, model: Model, num_requests: int, context: int, query_len: int) -> Step:
        seq_len = context + query_len
        blocks = blocks_of(seq_len)
        table = torch.arange(num_requests * blocks, dtype=torch.int32).view(num_requests, blocks)
        positions, groups = torch.arange(context, seq_len), len(kv_cache.groups(model))
        slots = table[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        step_context = StepContext(
            positions.repeat(num_requests),
            torch.arange(num_requests, dtype=torch.int32),
            torch.arange(num_requests + 1, dtype=torch.int32) * query_len,
            torch.full((num_requests,), seq_len, dtype=torch.int32),
            (table,) * groups,
            (slots.flatten(),) * groups,
            query_len,
        )
        ids = torch.randint(model.config.vocab_size, (num_requests * query_len,))
        kv_bytes = num_requests * sum(
            _read_tokens(spec, seq_len) * len(layers) * spec.page_bytes(1)
            for spec, layers in kv_cache.groups(model).items()
        )
        return cls(model, ids, step_context, model.weight_bytes + kv_bytes)

    @torch.inference_mode()
    def run(self) -> Tensor:
        hidden = self.model.forward(self.input_ids, self.context)
        return self.model.compute_logits(hidden[self.context.query_start_loc[1:] - 1])

    @torch.inference_mode()
    def replayed(self, rounds: int) -> float:
        """Seconds, the best of so many."""
        return best_time(record(self.run, Memory()).replay, rounds)

    @torch.inference_mode()
    def columns(self, rate: float, *, replays: bool) -> list[str]:
        rounds = 15 if replays else 3
        recorded = record(self.run, Memory())
        times = kernel_times(recorded, min(rounds, 3))
        seconds = [sum(times.get(name, 0) for name in names) for names in KERNELS.values()]
        seconds.append(best_time(self.run, rounds))
        seconds.append(best_time(recorded.replay, rounds) if replays else float("nan"))
        return [f"{1e3 * value:10.2f}" for value in (*seconds, self.read_bytes / rate)]


def kernel_times(recorded: Recorded, rounds: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Seconds in each kernel: its calls of one step, each made alone, in order; of each the best of the rounds."""
    names = {library.address(name): name for group in KERNELS.values() for name in group}
    calls = [(replay, index) for replay in recorded.native for index in range(len(replay.functions))]
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for place, (replay, index) in enumerate(calls):
            best[place] = min(best[place], best_time(partial(replay.make, index), 1, clock))
    times: dict[str, float] = {}
    for (replay, index), seconds in zip(calls, best, strict=True):
        name = names.get(int(replay.functions[index]), "other")
        times[name] = times.get(name, 0) + seconds
    return times


if __name__ == "__main__":
    main()
