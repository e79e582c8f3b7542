"""Requests of one step wait for each other's masks, but not for long."""

from pathlib import Path

import numpy as np
import pytest

from pagewire.services.executor.grammar import constraints
from pagewire.services.executor.grammar.compiler import Compiler
from pagewire.services.executor.grammar.constraints import GrammarConstraints
from pagewire.services.executor.grammar.matcher import GrammarMatcher
from pagewire.services.executor.grammar.thinking import ThinkingMatcher
from pagewire.v1.common_pb2 import Grammar, SamplingParams
from tests.services.executor.helpers.constrained import EOS, VOCAB_SIZE
from tests.services.tokenizer.tiny_tokenizers import save_byte_level

ROWS = np.array([0, 1])


@pytest.fixture
def two_rows(tmp_path: Path) -> GrammarConstraints:
    """The masks of two requests, which are not filled yet."""
    params = SamplingParams(grammar=Grammar(json_schema="{}"))
    compiled = Compiler(save_byte_level(tmp_path), VOCAB_SIZE, [EOS]).compile(params.grammar)
    rows = GrammarConstraints(2, VOCAB_SIZE)
    for row in ROWS.tolist():
        rows.fill(row, GrammarMatcher(compiled, params, [EOS]), num_prompt_tokens=5)
    return rows


def test_requests_whose_tokens_take_little_time_go_on(two_rows: GrammarConstraints) -> None:
    assert two_rows.masks(ROWS, None, None) is not None
    assert two_rows.errors(ROWS) == {}


@pytest.mark.parametrize("limits", [["_MAX_TOKEN_SECONDS"], ["_MAX_STEP_SECONDS", "_MAX_USUAL_SECONDS"]])
def test_a_request_that_takes_too_long_ends(
    limits: list[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for limit in limits:
        monkeypatch.setattr(constraints, limit, 0.0)
    two_rows = request.getfixturevalue("two_rows")
    masked = two_rows.masks(ROWS, None, None)
    assert masked is not None and (masked[1] == -1).all()
    errors = two_rows.errors(ROWS)
    assert sorted(errors) == [0, 1]
    assert "json_schema: it cannot be followed behind token 0 of the output: a token takes" in errors[0]


def test_a_slow_token_is_no_fault_while_a_step_takes_little_time(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(constraints, "_MAX_USUAL_SECONDS", 0.0)
    two_rows = request.getfixturevalue("two_rows")
    two_rows.masks(ROWS, None, None)
    assert two_rows.errors(ROWS) == {}


def test_a_budget_of_reasoning_holds_however_long_its_masks_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "_MAX_TOKEN_SECONDS", 0.0)
    params = SamplingParams()
    params.thinking.begun, params.thinking.budget = True, 0
    params.thinking.end.token_ids.append(7)
    rows = GrammarConstraints(2, VOCAB_SIZE)
    rows.fill(0, ThinkingMatcher(params, None, [EOS], VOCAB_SIZE), num_prompt_tokens=5)
    masked = rows.masks(ROWS[:1], None, None)
    assert masked is not None and np.unpackbits(masked[1].view(np.uint8), bitorder="little").nonzero()[0].tolist() == [
        7
    ]
    assert rows.errors(ROWS) == {}
