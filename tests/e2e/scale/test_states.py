"""The real scheduler and model runner, step by step, with layers that have a state, alone and beside attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.registry import ARCHITECTURES
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.step.limits import Limits
from pagewire.services.scheduler.values.request import Request
from tests.e2e.scale.test_kv_groups import Line, expected
from tests.services.executor.helpers.stepping import CPU, prompt
from tests.services.executor.models.toy import TOY, ToyModel, write_toy

STATE_TOKENS = 8
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=11, max_model_len=96, block_size=4, state_tokens=STATE_TOKENS)
KINDS = [("state", "state"), ("state", "full", "window", "state")]


def load(directory: Path, monkeypatch: pytest.MonkeyPatch, kinds: Sequence[str]) -> ToyModel:
    monkeypatch.setitem(ARCHITECTURES, TOY.name, TOY)
    model = load_model(write_toy(directory, kinds), dtype="float32", device=CPU, load_format="dummy")
    assert isinstance(model, ToyModel)
    generator = torch.Generator().manual_seed(1)
    for name, target in model.load_targets().items():
        if not name.endswith(("norm.weight", "A_log")):
            target.normal_(0.0, 0.5, generator=generator)
    return model


@pytest.fixture(params=KINDS, ids="+".join)
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyModel:
    return load(tmp_path, monkeypatch, request.param)


def make_line(model: ToyModel, num_blocks: int = 80) -> Line:
    """Runs a line. num_blocks: a quarter of them, or half, are of states, which are for twice as many tokens."""
    runner = assemble(model, LIMITS, num_blocks, CPU)
    for cache in runner.kv_caches:
        cache.fill_(torch.nan)  # reading what was never written shows
    return Line(runner)


PROMPTS = [prompt(length, seed=length) for length in (60, 3, 17, 8, 41, 5)]


def test_tokens_are_those_of_the_model_without_a_cache(model: ToyModel) -> None:
    line = make_line(model)
    answers = [expected(model, token_ids) for token_ids in PROMPTS]
    assert len({token for answer in answers for token in answer}) > 8, "weights must distinguish tokens"
    assert line.generate(PROMPTS) == answers
    assert line.replica.kv.num_free_blocks == line.replica.kv.num_blocks


def test_a_request_that_loses_its_state_computes_it_again(model: ToyModel) -> None:
    """Four blocks of states, of which a request has two where a step goes over the end of one."""
    line = make_line(model, num_blocks=8 if model.config.kinds[1] == "state" else 20)
    prompts = [token_ids[:20] for token_ids in PROMPTS]
    assert line.generate(prompts) == [expected(model, token_ids) for token_ids in prompts]
    assert line.replica.counts.num_preemptions > 0


def test_a_prefix_hit_ends_where_a_block_of_states_does(model: ToyModel) -> None:
    line = make_line(model)
    (answer,) = line.generate([prompt(60)])
    follow_up = prompt(60) + answer + [9, 9, 9]
    assert line.generate([follow_up]) == [expected(model, follow_up)]
    assert line.replica.counts.num_prefix_hits == 69 // STATE_TOKENS * STATE_TOKENS
    branch = [*prompt(60)[:45], 9, 9]
    assert line.generate([branch]) == [expected(model, branch)]
    assert line.replica.counts.num_prefix_hits == 64 + 40, (
        "up to there, the state of the first request is this one's, too"
    )


@pytest.mark.parametrize("length", [7, 10])
def test_two_requests_never_take_in_one_anothers_tokens(model: ToyModel, length: int) -> None:
    """Equal prompts in one step: each has a state of its own, because no request reads what the same step writes. Where
    they are longer than a block of states, the others wait for it."""
    line, prompts = make_line(model), [prompt(length), prompt(length), [*prompt(length - 1), 7]]
    assert line.generate(prompts) == [expected(model, token_ids) for token_ids in prompts]


def test_an_executors_death_and_aborts_change_no_token(model: ToyModel) -> None:
    line = make_line(model)

    def happening(step: int, requests: list[Request]) -> None:
        if step in (4, 12):
            line.die()
        if step == 7:
            line.scheduler.abort(requests[4])

    outputs = line.generate(PROMPTS, happening)
    for index, (output, token_ids) in enumerate(zip(outputs, PROMPTS, strict=True)):
        answer = expected(model, token_ids)
        assert output == (answer[: len(output)] if index == 4 else answer)
    assert line.replica.kv.num_free_blocks == line.replica.kv.num_blocks
