"""Drafting on the GPU's kernels, in Triton's interpreter. Run by test_triton_executor.py as

    TRITON_INTERPRET=1 PAGEWIRE_CPU_KERNELS=triton python -m tests.services.executor.triton.speculation DIRECTORY METHOD

in a process of its own: a few requests with different numbers of drafts, two steps in flight, eagerly
and through graphs. While a step is launched, the host reads no tensor. Prints, as JSON, the tokens of each request and
the drafts of each step, which the test compares with the CPU's.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from pagewire.kernels.ops import cpu_backend
from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.input_batch import InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.graphs.capture_sizes import graph_shapes
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.speculation.draft_model import DraftModel
from pagewire.services.executor.speculation.draft_steps import Target
from pagewire.services.executor.speculation.heads import HeadProposer
from pagewire.services.executor.speculation.load_head import load_head
from pagewire.services.executor.speculation.ngram import NgramProposer
from pagewire.services.executor.speculation.quantized_copy import quantized_copy
from pagewire.services.executor.speculation.self_draft import SelfDraft
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.start.graph_capture import capture_shapes
from pagewire.services.executor.step.step import Step
from tests.kernels.triton.interpreted import nothing_computed, quick_interpreter
from tests.services.executor.graphs.test_cuda_graphs import ReplayedFunction
from tests.services.executor.helpers.far_memory import far_memory, unread
from tests.services.executor.helpers.stepping import CPU, GREEDY, LIMITS, Driver, prompt, sampling_params, tiny_llama
from tests.services.executor.speculation.test_heads import write_head

NUM_BLOCKS = 48
NUM_DRAFTS = 2
# Drafts of each of three requests, by step.
COUNTS = ((2, 2, 2), (1, 2, 0), (0, 2, 1))
METHODS = ("ngram", "self", "draft_model", "eagle3")


class Watched:
    """A proposer, and what it has drafted."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._seen: list[tuple[np.ndarray, Tensor, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(
        self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables
    ) -> np.ndarray | None:
        drafted = self._proposer.propose(step, batch, state, block_tables)
        if batch.num_samples is not None and not step.has_fixed_drafts:
            self._seen.append((batch.rows, state.columns.num_tokens.clone(), state.token_ids.clone()))
        return drafted

    def drafts(self) -> list[list[list[int]]]:
        """Returns values by step and request."""
        return [
            [
                token_ids[row, num_tokens[row] : num_tokens[row] + count].tolist()
                for row, count in zip(rows.tolist(), counts, strict=True)
            ]
            for counts, (rows, num_tokens, token_ids) in zip(COUNTS, self._seen, strict=True)
        ]


def make(directory: Path, method: str) -> tuple[DecoderModel, Proposer]:
    """A tiny target, and its proposer."""
    model = tiny_llama(directory / method, num_hidden_layers=2 if method == "eagle3" else 1)
    target = Target(model, LIMITS, NUM_BLOCKS, CPU)
    if method == "ngram":
        return model, NgramProposer(NUM_DRAFTS, 3, 1)
    if method == "self":
        return model, SelfDraft(target, quantized_copy(model, 4), 4, NUM_DRAFTS)
    if method == "draft_model":
        twin = tiny_llama(directory / "twin", num_hidden_layers=1)
        return model, DraftModel(target, twin, NUM_DRAFTS, LIMITS.max_model_len)
    path = write_head(directory / "head", eagle_aux_hidden_state_layer_ids=[1, 1, 1])
    head = load_head(path, model, LIMITS.max_model_len, CPU)
    return model, HeadProposer(target, head, NUM_DRAFTS, LIMITS.max_model_len)


def capture_some(runner: ModelRunner) -> None:
    """Graphs of three requests: of their steps, and of a drafter's rounds and what it computes before them."""
    sizes = (3,)
    shapes = graph_shapes(sizes, LIMITS, NUM_DRAFTS)
    capture_shapes(runner, shapes[:1], lambda fraction, text: None, ReplayedFunction)
    few = [shape for shape in runner.proposer.graph_shapes(sizes) if shape.num_tokens in (3, 16)]
    runner.proposer.capture(few, lambda fraction, text: None, ReplayedFunction)


def generate(directory: Path, method: str, *, depth: int) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Tokens of each request, and drafts by step and request. depth: steps in flight; with several, the host is to read
    no tensor until it takes a result."""
    model, proposer = make(directory, method)
    watched: Any = Watched(proposer)
    runner = assemble(model, LIMITS, NUM_BLOCKS, CPU, proposer=watched)
    with nothing_computed():
        capture_some(runner)
    driver = Driver(runner, NUM_BLOCKS)
    watching = unread if depth > 1 else contextlib.nullcontext
    prompts = {0: prompt(3, seed=4) * 4, 1: prompt(5, seed=1), 2: prompt(9, seed=2)}
    for request_id, token_ids in prompts.items():
        sampling = sampling_params(seed=5, temperature=0.8, top_k=50) if request_id == 1 else GREEDY
        driver.add(request_id, token_ids, sampling)
    with watching():
        outputs = [driver.launch({request_id: len(token_ids) for request_id, token_ids in prompts.items()})]
    for counts in COUNTS:
        if len(outputs) >= depth:
            driver.collect(outputs.pop(0))
        with watching():
            outputs.append(driver.launch({i: 1 + count for i, count in enumerate(counts)}, dict(enumerate(counts))))
    for output in outputs:
        driver.collect(output)
    return list(driver.tokens.values()), watched.drafts()


def main() -> None:
    with quick_interpreter(), far_memory():
        tokens, drafts = generate(Path(sys.argv[1]), sys.argv[2], depth=2)
    print(json.dumps({"backend": cpu_backend(), "tokens": tokens, "drafts": drafts}))


if __name__ == "__main__":
    main()
