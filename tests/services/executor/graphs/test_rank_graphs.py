"""Ranks of a group step through recorded graphs, with the stand-in for the device's that `test_cuda_graphs` has.

Each rank captures by itself what all of them do together, and replays it when the others do: the same shapes in the
same order, or they would wait for each other for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.config.speculation import Speculation
from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.graphs.cuda_graphs import CudaGraphs, Function
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.parallel.group import Group
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.sampling.tokens import Tokens
from pagewire.services.executor.start.graph_capture import capture_graphs
from tests.services.executor.graphs.test_cuda_graphs import PROMPTS, SIZES, ReplayedFunction
from tests.services.executor.helpers.staged import Staged, joined_runners
from tests.services.executor.helpers.stepping import (
    LIMITS,
    Driver,
    alone,
    check_random_steps,
    graph_steps,
    prompt,
    sampling_params,
)
from tests.services.executor.models.tiny import load, save_tiny
from tests.services.executor.speculation.test_exactness import NUM_TOKENS, Follower, generate
from tests.services.executor.speculation.test_ranks import SAMPLINGS, TEXT, proposer_of

NUM_BLOCKS = 64
SHAPE: dict[str, Any] = {
    "vocab_size": 200,
    "max_position_embeddings": 96,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"intermediate_size": 64},
    "Mixtral": {"intermediate_size": 64, "num_local_experts": 4},
    "Gemma3Text": {
        "intermediate_size": 64,
        "query_pre_attn_scalar": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
Replays = list[tuple[str, BatchShape]]
MakeProposer = Callable[[Group, Model, Tokens], Proposer | None]


class Noted(ReplayedFunction):
    def __init__(self, function: Function, notes: list[Noted]) -> None:
        super().__init__(function)
        self._notes = notes

    def replay(self) -> None:
        self._notes.append(self)
        super().replay()


class RankGraphs:
    """Returns the graphs that each rank replays, the leader last."""

    def __init__(self, runners: Sequence[ModelRunner]) -> None:
        self._runners = runners
        with ThreadPoolExecutor(len(runners)) as pool:  # at the same time, as they wait for each other
            self._notes = list(pool.map(self._capture, runners))

    @staticmethod
    def _capture(runner: ModelRunner) -> list[Noted]:
        torch.set_num_threads(1)
        notes = list[Noted]()
        capture_graphs(runner, SIZES, lambda *_: None, lambda function: Noted(function, notes), PROMPTS)
        notes.clear()  # what is captured is run, too
        for cache in runner.kv_caches:
            cache.fill_(float("nan"))
        return notes

    def reset(self) -> None:
        """Between steps, no request has a row."""
        for runner in self._runners:
            runner.reset()

    def replays(self) -> list[Replays]:
        """Returns a value for each rank."""
        return [self._named(*pair) for pair in zip(self._runners, self._notes, strict=True)]

    @staticmethod
    def _named(runner: ModelRunner, notes: Sequence[Noted]) -> Replays:
        graphs = runner._graphs
        assert isinstance(graphs, CudaGraphs)
        names = {id(graph): key for key, graph in graphs._graphs.items()}
        return [names[id(graph)] for graph in notes if id(graph) in names]


@contextmanager
def ranks_with_graphs(
    path: Path,
    tensor: int,
    stages: int,
    made: MakeProposer = lambda *_: None,
    drafts: int | None = None,
    **options: Any,
) -> Iterator[tuple[Staged, RankGraphs]]:
    runners = joined_runners(
        lambda group: load(path, tensor=group.tensor, stage=group.stage, **options),
        tensor, stages, LIMITS, NUM_BLOCKS, made,
    )  # fmt: skip
    graphs = RankGraphs(runners)
    *followers, leader = runners
    ranks = Staged([*map(Follower, followers), leader])  # type: ignore[list-item]
    try:
        yield ranks, graphs
    finally:
        ranks.stop()


def assert_together(graphs: RankGraphs) -> Replays:
    """All ranks of the last stage replay the same graphs, whatever the leader alone does between them; all ranks the
    same forward passes. Those of the leader."""
    *others, leader = graphs.replays()
    sampling = [replays for replays in others if any(name == "tokens" for name, _ in replays)]
    assert all(replays == leader for replays in sampling)
    *others, forward = ([replay for replay in replays if replay[0] == "forward"] for replays in (*others, leader))
    assert forward and all(replays == forward for replays in others)
    return forward


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
@pytest.mark.few("2-1-Qwen3", "2-1-Mixtral", "1-2-Gemma3Text")
def test_graphs_change_no_token(tmp_path: Path, family: str, tensor: int, stages: int) -> None:
    """Steps of prompts, of decodes and of both, padded, exact and eager; requests with extras, which only the leader
    knows of."""
    save_tiny(tmp_path, family, **SHAPE | FAMILIES[family])
    whole = load(tmp_path)
    with ranks_with_graphs(tmp_path, tensor, stages) as (ranks, graphs):
        for seed in range(2):
            check_random_steps(whole, Driver(ranks, NUM_BLOCKS), seed)  # type: ignore[arg-type]
            graphs.reset()
        replayed = assert_together(graphs)
    kinds = {(shape.is_uniform, shape.min_query_len > 1) for _, shape in replayed}
    assert len(kinds) > 1, "decodes alone were replayed"


def test_sampling_of_ranks_is_replayed_with_extras_and_without(tmp_path: Path) -> None:
    """Log probabilities are an extra, of which the other ranks know nothing."""
    save_tiny(tmp_path, "Qwen3", **SHAPE | FAMILIES["Qwen3"])
    whole = load(tmp_path)
    samplings = [sampling_params(temperature=0), sampling_params(temperature=0, logprobs=2, repetition_penalty=1.3)]
    with ranks_with_graphs(tmp_path, 2, 1) as (ranks, graphs):
        driver = Driver(ranks, NUM_BLOCKS)  # type: ignore[arg-type]
        for request_id, sampling in enumerate(samplings):
            driver.add(request_id, prompt(6, seed=request_id), sampling)
            driver.step({request_id: 6})
            driver.step({request_id: 1})
            driver.step({request_id: 1})
            driver.finish(request_id)
        for replays in graphs.replays():
            assert [name for name, _ in replays if name != "forward"] == ["logits", "tokens"] * 4
        for request_id, sampling in enumerate(samplings):
            assert driver.tokens[request_id] == alone(whole, prompt(6, seed=request_id), 3, sampling)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.few("4")
def test_whole_experts(tmp_path: Path, size: int) -> None:
    changes = {"num_attention_heads": size, "num_key_value_heads": size}
    save_tiny(tmp_path, "Mixtral", **SHAPE | FAMILIES["Mixtral"] | changes)
    with ranks_with_graphs(tmp_path, size, 1, whole_experts=True) as (ranks, graphs):
        check_random_steps(load(tmp_path), Driver(ranks, NUM_BLOCKS), 0)  # type: ignore[arg-type]
        assert_together(graphs)


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_which_steps_are_replayed(tmp_path: Path, tensor: int, stages: int) -> None:
    """Returns the outputs of one rank."""
    save_tiny(tmp_path, "Qwen3", **SHAPE | FAMILIES["Qwen3"])
    whole = load(tmp_path)
    with ranks_with_graphs(tmp_path, tensor, stages) as (ranks, graphs):
        driver = Driver(ranks, NUM_BLOCKS)  # type: ignore[arg-type]
        for request_id, length in enumerate((20, 40, 3, 90)):
            driver.add(request_id, prompt(length, seed=request_id))
        replayed, eager = graph_steps("replayed"), graph_steps("eager")
        driver.step({0: 20, 1: 17, 2: 3})  # long queries and a short one
        driver.step({0: 1, 1: 23, 2: 1})  # beside decodes
        driver.step({0: 1, 3: 5})  # short ones alone
        driver.step({3: 60})  # a long one alone: nothing is sampled
        driver.step({0: 1, 1: 1, 2: 1})
        counted = 5 * tensor  # by each rank of the last stage, here in one process
        assert (graph_steps("replayed"), graph_steps("eager")) == (replayed + counted, eager)
        shapes = [shape.num_tokens for _, shape in assert_together(graphs)]
        assert shapes == [40, 40, 8, 64, 4]
        for request_id, num_tokens in ((0, 4), (1, 2), (2, 3)):
            length = (20, 40, 3)[request_id]
            assert driver.tokens[request_id] == alone(whole, prompt(length, seed=request_id), num_tokens)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts(tmp_path: Path, method: str) -> None:
    save_tiny(tmp_path, "Llama", **SHAPE, intermediate_size=64)
    speculation = Speculation(method, 4, model=str(tmp_path) if method == "draft_model" else "")
    expected = [alone(load(tmp_path), TEXT, NUM_TOKENS, sampling) for sampling in SAMPLINGS]

    def made(group: Group, model: Model, tokens: Tokens) -> Proposer | None:
        return proposer_of(speculation, tmp_path, group, model, tokens)

    with ranks_with_graphs(tmp_path, 2, 1, made) as (ranks, graphs):
        assert generate(Driver(ranks, NUM_BLOCKS), SAMPLINGS) == expected  # type: ignore[arg-type]
        longest = {shape.max_query_len for _, shape in assert_together(graphs)}
        assert 1 + speculation.num_speculative_tokens in longest, "no step with drafts was replayed"
