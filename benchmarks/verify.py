"""What checking drafted tokens costs on a CPU: `python -m benchmarks.verify [MODEL] [--quantization none]`.

Steps in which each request has some tokens, the last known one and drafts, through `ModelRunner.execute`, greedy and
as the executor runs them: staged, replayed, sampled at every position. "ratio" compares with one token; steps of one
and of several tokens take turns. Products (without the head's), attention and the head with the choice of tokens are
measured kernel by kernel; the rest is everything else. With `--threads 1` times are those of the processor, so that
others on the machine matter little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.executor_step import KERNELS, Step, bind_cache, blocks_of, kernel_times
from pagewire.config import DEFAULT_MODEL
from pagewire.config.sampling_params import with_defaults
from pagewire.files.models import resolve_model
from pagewire.kernels import ops
from pagewire.kernels.cpu.recording import Memory, record
from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.input_batch import InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.graphs.recorded_steps import RecordedSteps
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.step import step as steps
from pagewire.services.executor.step.limits import Limits
from pagewire.v1.common_pb2 import SamplingParams

BLOCK_SIZE = 16
QUERY_LENS = (1, 2, 3, 5, 9, 17)
STREAMS = (1, 4)
CONTEXTS = (256, 2048)
ROUNDS = 9
GREEDY = with_defaults(SamplingParams(temperature=0))


@dataclass(frozen=True)
class Refused(Proposer):
    """Drafts that are mostly wrong, so that a request grows slowly."""

    max_draft_tokens: int

    def propose(self, step: steps.Step, batch: InputBatch, state: RequestState, block_tables: BlockTables) -> None:
        if batch.num_samples is None:
            return
        for row, samples in zip(batch.sampled_rows.tolist(), batch.num_samples.tolist(), strict=True):
            known = int(state.columns.num_tokens[row])
            state.token_ids[row, known : known + samples - 1] = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--quantization", help="as of `pagewire serve`")
    parser.add_argument("--dtype", default="auto", help="as of `pagewire serve`")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, nargs="+", default=QUERY_LENS, help="of a request in a step")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_model(
        resolve_model(args.model), dtype=args.dtype, device=torch.device("cpu"), quantization=args.quantization
    )
    columns = ("streams", "context", "tokens", "ms", "ratio", "products", "attention", "head", "rest")
    print(f"{args.threads} threads, {model.config.dtype}, quantization {args.quantization}; ms per step")
    print(*(f"{name:>9}" for name in columns))
    for num_streams in args.streams:
        for context in args.contexts:
            print_rows(model, num_streams, context, sorted({1, *args.tokens}))


def print_rows(model: Model, num_streams: int, context: int, lens: list[int]) -> None:
    """Of steps that begin with so many tokens known and computed."""
    alone = parts(model, num_streams, context, lens)
    whole = times(model, num_streams, context, lens)
    for query_len in lens:
        products, attention, head = alone[query_len]
        total = whole[query_len]
        ratio = total / whole[1]
        values = (total, ratio, products, attention, head, total - products - attention - head)
        texts = [f"{value if index == 1 else 1e3 * value:9.2f}" for index, value in enumerate(values)]
        print(f"{num_streams:>9}{context:>10}{query_len:>10}", *texts, flush=True)


def processor_clock() -> Callable[[], float]:
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


@torch.inference_mode()
def times(model: Model, num_streams: int, context: int, lens: list[int]) -> dict[int, float]:
    """Seconds of steps through the runner, by tokens of a request; the best of rounds that take turns."""
    # Each step may gain a token per request, and drafts need room behind them.
    num_steps = (ROUNDS + 2) * len(lens)
    max_len = context + 2 + num_steps * 2 + max(lens)
    limits = Limits(
        block_size=BLOCK_SIZE,
        max_num_seqs=num_streams,
        max_num_batched_tokens=max(num_streams * max(lens), 64),
        max_model_len=max_len,
    )
    num_blocks = num_streams * blocks_of(max_len)
    proposer = Refused(max(max(lens) - 1, 1))
    runner = ModelRunner(
        model,
        limits,
        num_blocks,
        torch.device("cpu"),
        graphs=RecordedSteps(num_streams, limits.max_num_batched_tokens, max_draft_tokens=proposer.max_draft_tokens),
        proposer=proposer,
    )
    for cache in runner.kv_caches:
        cache.copy_(torch.randn(cache.shape[1:]))
    best, clock = dict.fromkeys(lens, float("inf")), processor_clock()
    blocks = np.arange(num_blocks, dtype=np.int32).reshape(num_streams, -1)
    new = [
        steps.NewRequest(
            request_id=index,
            token_ids=np.full(context + 1, 7 + index, dtype=np.int32),
            num_prompt_tokens=context,
            num_computed_tokens=context,
            blocks=[steps.Blocks(0, blocks[index])] * len(runner.kv_groups),
            sampling=GREEDY,
        )
        for index in range(num_streams)
    ]
    for turn in range(ROUNDS + 2):
        for query_len in lens:
            step = steps.Step(
                step_id=0,
                request_ids=list(range(num_streams)),
                num_scheduled_tokens=np.full(num_streams, query_len),
                num_new_blocks=np.zeros((num_streams, len(runner.kv_groups)), dtype=np.int64),
                new_block_ids=np.empty(0, dtype=np.int32),
                new_requests=new,
                num_draft_tokens=np.full(num_streams, query_len - 1),
            )
            new = []
            started = clock()
            runner.execute(step).wait()
            if turn >= 2:
                best[query_len] = min(best[query_len], clock() - started)
    return best


@torch.inference_mode()
def parts(model: Model, num_streams: int, context: int, lens: list[int]) -> dict[int, tuple[float, float, float]]:
    """Seconds of products, attention, and the head with the choice of tokens, by tokens of a request."""
    bind_cache(model, num_streams * blocks_of(context + max(lens)))
    memory, clock, result = Memory(), processor_clock(), {}
    for query_len in lens:
        step = Step.drafted(model, num_streams, context, query_len)
        hidden = model.forward(step.input_ids, step.context)
        forward = kernel_times(record(partial(model.forward, step.input_ids, step.context), memory), 7, clock)
        head = kernel_times(record(partial(choose, model, hidden), memory), 7, clock)
        products, attention = (sum(forward.get(name, 0) for name in KERNELS[key]) for key in ("products", "attention"))
        result[query_len] = products, attention, sum(head.values())
    return result


def choose(model: Model, hidden: Tensor) -> Tensor:
    """The most probable token of each position, as the runner chooses it."""
    num_positions = len(hidden)
    temperature, top_p, min_p = torch.zeros(3, num_positions).unbind()
    integers = torch.zeros(num_positions, dtype=torch.int64)
    rows, token_ids = torch.arange(num_positions, dtype=torch.int32), torch.zeros(num_positions, 1, dtype=torch.int32)
    return ops.sample_tokens(
        model.compute_logits(hidden), rows, temperature, integers, top_p, min_p, integers, token_ids, integers, rows
    )


if __name__ == "__main__":
    main()
