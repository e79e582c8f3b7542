"""Models that draft on two ranks: whole on each, or in parts as the target. Tokens and drafts are those of one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from pagewire.config import ExecutorConfig
from pagewire.config.speculation import Speculation
from pagewire.errors import StartupError
from pagewire.services.executor.models.pooling import LAST_STATE
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.parallel.group import Group
from pagewire.services.executor.ranks.outcomes import Outcomes
from pagewire.services.executor.ranks.step_message import step_to_proto
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.sampling.tokens import Tokens
from pagewire.services.executor.service.convert import step_from_proto
from pagewire.services.executor.speculation.build import make_proposer
from pagewire.services.executor.speculation.draft_steps import Target
from pagewire.services.executor.speculation.drafters import load_drafter
from pagewire.services.executor.step.step import Step, StepOutput
from tests.services.executor.helpers.far_memory import far_memory
from tests.services.executor.helpers.staged import Staged, joined_runners
from tests.services.executor.helpers.stepping import (
    CPU,
    GREEDY,
    LIMITS,
    PENALIZED,
    SEEDED,
    WITH_LOGPROBS,
    Driver,
    alone,
    make_driver,
)
from tests.services.executor.models.tiny import load, save_tiny
from tests.services.executor.speculation.test_exactness import NUM_TOKENS, TEXT, Follower, generate
from tests.services.executor.speculation.test_heads import write_head
from tests.services.executor.speculation.test_mtp import save_with_head

SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "max_position_embeddings": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
}
SAMPLINGS = [GREEDY, SEEDED, PENALIZED, WITH_LOGPROBS]


def proposer_of(speculation: Speculation, path: Path, group: Group, model: Model, tokens: Tokens) -> Proposer | None:
    config = ExecutorConfig(model=str(path), tensor_parallel_size=group.size)
    drafter = load_drafter(speculation, config, model, LIMITS, CPU, group)
    return make_proposer(speculation, LAST_STATE, group, Target(model, LIMITS, 64, CPU, tokens=tokens), drafter)


def write_models(directory: Path, method: str) -> tuple[Path, str]:
    """The target, and the model that drafts."""
    target = directory / "target"
    if method == "mtp":
        save_with_head(target, "Glm4MoeForCausalLM")
        return target, ""
    save_tiny(target, "Llama", **SIZES)
    if method == "eagle3":
        return target, str(write_head(directory / "head"))
    return target, "self:q4" if method == "self" else str(target)


@pytest.mark.parametrize(
    ("method", "ranks_of_drafter"),
    [("draft_model", 1), ("draft_model", 2), ("self", 0), ("eagle3", 0), ("mtp", 0)],
    ids=["draft model, whole", "draft model, split", "self", "eagle3", "mtp"],
)
@pytest.mark.few("draft model, split", "eagle3", "mtp")
def test_two_ranks_draft_as_one(tmp_path: Path, method: str, ranks_of_drafter: int) -> None:
    path, drafter = write_models(tmp_path, method)
    speculation = Speculation(method, 4, model=drafter, draft_tensor_parallel_size=ranks_of_drafter)
    expected = [alone(load(path), TEXT, NUM_TOKENS, sampling) for sampling in SAMPLINGS]

    def made(group: Group, model: Model, tokens: Tokens) -> Proposer | None:
        return proposer_of(speculation, path, group, model, tokens)

    follower, leader = joined_runners(lambda group: load(path, tensor=group.tensor), 2, 1, LIMITS, 64, made)
    staged: Any = Staged([Follower(follower), leader])  # type: ignore[list-item]
    driver = Driver(staged, 64)
    assert generate(driver, SAMPLINGS) == expected
    if method == "draft_model":  # of equal weights: all drafts are right
        driver.add(9, TEXT, SEEDED)
        driver.step({9: len(TEXT)})
        assert [int(driver.step({9: 5}, {9: 4}).num_tokens[0]) for _ in range(3)] == [5, 5, 5]
    staged.stop()


@dataclass
class LateFollower(Follower):
    """Learns what a step has gained when it has to, as on GPUs."""

    reported: SimpleQueue[int] = field(default_factory=SimpleQueue)  # with each step: how many before it are unknown
    outcomes: Outcomes = field(default_factory=Outcomes)

    def execute(self, step: Step) -> StepOutput:
        self.outcomes.wait(self.reported.get())
        output = self.runner.execute(step_from_proto(step_to_proto(step)))
        self.outcomes.add(output)
        return output


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
@pytest.mark.few("draft_model", "mtp")
def test_ranks_that_learn_of_results_at_different_times_compute_the_same(tmp_path: Path, method: str) -> None:
    """A device with rows that the host may not read. The leader knows a result before the next step is
    decided, or before it is computed, or only behind it."""
    path, drafter = write_models(tmp_path, method)
    speculation = Speculation(method, 4, model=drafter)
    expected = [alone(load(path), TEXT, NUM_TOKENS, sampling) for sampling in SAMPLINGS]

    def made(group: Group, model: Model, tokens: Tokens) -> Proposer | None:
        return proposer_of(speculation, path, group, model, tokens)

    with far_memory():
        follower, leader = joined_runners(lambda group: load(path, tensor=group.tensor), 2, 1, LIMITS, 64, made)
        late = LateFollower(follower)
        staged: Any = Staged([late, leader])  # type: ignore[list-item]
        driver, random, in_flight = Driver(staged, 64), np.random.default_rng(2), list[Any]()
        late.reported.put(0)
        for request_id, sampling in enumerate(SAMPLINGS):
            driver.add(request_id, TEXT, sampling)
        in_flight.append(driver.launch(dict.fromkeys(range(len(SAMPLINGS)), len(TEXT))))
        while running := [one for one, tokens in driver.tokens.items() if len(tokens) < NUM_TOKENS]:
            while len(in_flight) > int(random.integers(0, 2)):
                driver.collect(in_flight.pop(0))
            drafts = {one: int(random.integers(0, 5)) for one in running}
            late.reported.put(len(in_flight))
            if in_flight and random.random() < 0.5:
                in_flight[-1].wait()  # the leader learns of it when the step is on its way already
            in_flight.append(driver.launch({one: 1 + count for one, count in drafts.items()}, drafts))
        for output in in_flight:
            driver.collect(output)
        staged.stop()
    assert [tokens[:NUM_TOKENS] for tokens in driver.tokens.values()] == expected


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    path, _ = write_models(tmp_path, "self")
    model = load(path)
    speculation = Speculation("draft_model", 4, model=str(path), draft_tensor_parallel_size=3)
    with pytest.raises(StartupError, match="draft_tensor_parallel_size 3: with --tensor-parallel-size 1, method"):
        proposer_of(speculation, path, Group(), model, make_driver(model).runner._tokens)
